//! The lender's limits on a connection to a lease.

use std::io;

use aquifer_page::Bytes;
use aquifer_transport::channel::Channel;
use aquifer_transport::serving::Outbox;
use aquifer_transport::serving::limits::{Borrower, Pass, Traffic};

use super::{Exports, Peer, Refused, Storage};
use crate::proto::{MAX_PAYLOAD, Request, command};

/// The admission of a connection to its lease; `None` if no limit can apply.
#[derive(Debug, Default)]
pub(super) struct Admission(Option<Box<Pass>>);

impl Admission {
    /// Admits a connection, unless it is one too many for its host or its lease.
    pub(super) fn new(
        exports: &dyn Exports,
        export: &Storage,
        peer: &Peer,
    ) -> Result<Self, Refused> {
        let (Some(gate), Some(lease)) = (exports.gate(), export.id()) else {
            return Ok(Self::default());
        };
        let host = exports.borrower(lease).or_else(|| peer.host.clone());
        let pass = gate.enter(Borrower::new(host, peer.ip), lease).map_err(|full| {
            tracing::warn!(%lease, "refused a connection from {peer}: {full}");
            Refused::Forbidden(full.to_string())
        })?;
        Ok(Self(Some(Box::new(pass))))
    }

    /// Waits until the request may go on. The replies before it are sent first.
    ///
    /// # Errors
    /// The channel's error, also if the connection ends meanwhile.
    pub(super) fn wait(
        &mut self,
        request: &Request,
        outbox: &mut Outbox,
        channel: &mut dyn Channel,
    ) -> io::Result<()> {
        let Some(pass) = &mut self.0 else { return Ok(()) };
        // The server refuses a longer one, which must not cost others their turns.
        let length = Bytes(request.length.get().min(MAX_PAYLOAD).into());
        let traffic = match request.command.get() {
            command::READ => Traffic { sent: length, ..Traffic::default() },
            command::WRITE => Traffic { received: length, ..Traffic::default() },
            _ => Traffic::default(),
        };
        let prepare = |channel: &mut &mut dyn Channel| outbox.flush(&mut **channel);
        pass.wait(traffic, &mut { channel }, prepare, |channel, time| channel.pause(time))?;
        if matches!(request.command.get(), command::TRIM | command::WRITE_ZEROES) {
            pass.freed(Bytes(request.length.get().into()));
        }
        Ok(())
    }

    /// Adds what the connection transferred to its lease's figures.
    pub(super) fn tell_traffic(&mut self) {
        if let Some(pass) = &mut self.0 {
            pass.tell_traffic();
        }
    }
}
