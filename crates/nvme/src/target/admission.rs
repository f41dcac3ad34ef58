//! The lender's limits on the queues of a lease.

use std::sync::Arc;

use aquifer_page::{Bytes, LeaseId};
use aquifer_transport::channel::Channel;
use aquifer_transport::serving::Origin;
use aquifer_transport::serving::limits::{Borrower, Gate, Pass, Traffic};

use super::{Broken, MAX_TRANSFER, Subsystems};
use crate::proto::Command;
use crate::proto::command::io;

use super::link::Link;

/// The limits that apply to a connection, which names its lease.
pub(super) struct Entrance {
    gate: Arc<Gate>,
    borrower: Borrower,
    lease: LeaseId,
}

impl Entrance {
    /// Finds the limits of a lease; `None` if there are none.
    ///
    /// A host's name is proven only by the record of its lease: without one, its address counts.
    pub(super) fn new(
        subsystems: &dyn Subsystems,
        lease: LeaseId,
        origin: &Origin,
    ) -> Option<Self> {
        let borrower = Borrower::new(subsystems.borrower(lease), origin.ip);
        Some(Self { gate: subsystems.gate()?, borrower, lease })
    }

    /// Returns whether there is room for the connection. Logs the limit if not: the protocol
    /// carries no text.
    pub(super) fn has_room(&self, origin: &Origin) -> bool {
        let room = self.gate.check(&self.borrower, self.lease);
        room.inspect_err(|full| tracing::warn!("refused a connect from {}: {full}", origin.from))
            .is_ok()
    }

    /// Takes the connection in, once its host has proved its name.
    pub(super) fn enter(self) -> Result<Admission, Broken> {
        let pass = self.gate.enter(self.borrower, self.lease)?;
        Ok(Admission(Some(pass)))
    }
}

/// The admission of a queue to its lease; `None` if no limit can apply.
#[derive(Debug, Default)]
pub(super) struct Admission(Option<Pass>);

impl Admission {
    /// Waits until the command may go on. The answers before it are sent first.
    pub(super) fn wait(&mut self, command: &Command, link: &mut Link) -> Result<(), Broken> {
        let Some(pass) = &mut self.0 else { return Ok(()) };
        // The target refuses a longer one, which must not cost others their turns.
        let length = Bytes(u64::from(command.sgl.length.get()).min(MAX_TRANSFER as u64));
        let traffic = match command.opcode {
            io::READ => Traffic { sent: length, ..Traffic::default() },
            io::WRITE | io::COMPARE => Traffic { received: length, ..Traffic::default() },
            _ => Traffic::default(),
        };
        let pause = |link: &mut Link, time| Ok(link.socket.pause(time)?);
        pass.wait(traffic, link, |link| Ok(link.flush()?), pause)
    }

    /// Charges the host for blocks that it freed.
    pub(super) fn freed(&mut self, bytes: u64) {
        if let Some(pass) = &mut self.0 {
            pass.freed(Bytes(bytes));
        }
    }

    /// Adds what the queue transferred to its lease's figures.
    pub(super) fn tell_traffic(&mut self) {
        if let Some(pass) = &mut self.0 {
            pass.tell_traffic();
        }
    }
}
