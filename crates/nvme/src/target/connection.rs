//! The life of a connection: handshake, Connect, authentication, commands.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use aquifer_page::LeaseId;
use aquifer_transport::Address;
use aquifer_transport::channel::Socket;
use aquifer_transport::serving::{self, Origin, Place, Service};

use super::admin::AdminQueue;
use super::admission::Entrance;
use super::authenticate;
use super::connect::{self, Connected, Rejected, Seat};
use super::controller::{ADMIN, Controller};
use super::handshake;
use super::io::IoQueue;
use super::link::{AROUND_DATA, Link, Ring};
use super::parse::Pdu;
use super::{Broken, Core, Fatal};
use crate::proto::command::FABRICS;
use crate::proto::{Completion, NvmeStatus, fabrics};

/// The state that all connections of a listener share.
pub(super) struct Nvme {
    pub(super) core: Arc<Core>,
    /// The address at which hosts find this listener, if it differs from the listening address.
    pub(super) announced: Option<Address>,
}

impl Service for Nvme {
    const NAME: &'static str = "nvme";

    fn serve(&self, socket: Socket, origin: Origin, place: &Place<Self>) {
        let mut link = Link::new(socket, Instant::now() + self.core.limits.handshake);
        let from = origin.from.clone();
        let Err(broken) = self.talk(&mut link, &origin, place) else { return };
        tracing::info!("connection from {from} ended: {broken}");
        if let Broken::Fatal(fatal) = broken {
            // A host that breaks the protocol may not read the reason.
            let _ = link.terminate(&fatal);
        }
    }
}

impl Nvme {
    fn talk(&self, link: &mut Link, origin: &Origin, place: &Place<Self>) -> Result<(), Broken> {
        if !handshake::agree(link)? {
            return Ok(());
        }
        let Some((connected, id)) = self.wait_connect(link, origin)? else { return Ok(()) };
        let Connected { seat, size, flow_control, keep_alive } = connected;
        let Seat { controller, queue, .. } = &seat;
        let lease = controller.namespace.as_ref().map(|namespace| namespace.lease().id());
        if let Some(lease) = lease {
            place.note(lease);
        }
        let entrance = lease.and_then(|lease| Entrance::new(&*self.core.subsystems, lease, origin));
        if entrance.as_ref().is_some_and(|entrance| !entrance.has_room(origin)) {
            link.complete(id, NvmeStatus::CONNECT_BUSY, 0)?;
            return Ok(link.flush()?);
        }
        link.become_queue(Ring::new(size, flow_control));
        let host = &controller.host;
        let secrets = match lease {
            Some(_) => self.core.subsystems.secrets(&controller.subsystem, host),
            None => None,
        };
        let _told = match secrets {
            None => {
                let told = self.let_in(place, lease);
                complete_connect(link, id, controller, flow_control, false)?;
                told
            }
            Some(secrets) => {
                complete_connect(link, id, controller, flow_control, true)?;
                if !authenticate::run(link, &self.core, controller, origin, &secrets)? {
                    return Ok(());
                }
                self.let_in(place, lease)
            }
        };
        let admission = entrance.map(Entrance::enter).transpose()?.unwrap_or_default();
        link.take_time();
        let (subsystem, id) = (&controller.subsystem, controller.id);
        tracing::info!(%subsystem, controller = id, queue, "{host} connected");
        if let (Some(namespace), true) = (&controller.namespace, *queue != ADMIN) {
            let (controller, namespace) = (Arc::clone(controller), Arc::clone(namespace));
            IoQueue::new(link, size, controller, namespace, admission).run()?;
        } else {
            AdminQueue::new(link, self, Arc::clone(controller), keep_alive, &|| place.end())
                .run()?;
        }
        tracing::info!(%subsystem, controller = id, queue, "{host} disconnected");
        Ok(())
    }

    /// Settles the host at its lease: its connection counts, and need not make room for others. A
    /// host that only discovers proves nothing, so its connection makes room at any time.
    fn let_in(
        &self,
        place: &Place<Self>,
        lease: Option<LeaseId>,
    ) -> Option<serving::Connected<'_>> {
        let lease = lease?;
        place.settle(Some(lease));
        Some(serving::Connected::new(&*self.core.subsystems, lease))
    }

    /// Waits for an acceptable Connect, and returns its command identifier too.
    fn wait_connect(
        &self,
        link: &mut Link,
        origin: &Origin,
    ) -> Result<Option<(Connected, u16)>, Broken> {
        loop {
            let (command, payload) = match link.wait_next()? {
                None => return Ok(None),
                Some(Pdu::Command(command, payload)) => (command, payload),
                Some(_) => {
                    return Err(Fatal::sequence("a first PDU other than a command").into());
                }
            };
            let id = command.id.get();
            if command.opcode != FABRICS || command.fabrics_type() != fabrics::kind::CONNECT {
                link.complete(id, NvmeStatus::COMMAND_SEQUENCE.final_(), 0)?;
                continue;
            }
            match connect::accept(&self.core, link, &command, payload, origin) {
                Ok(connected) => return Ok(Some((connected, id))),
                Err(Rejected(status, result)) => {
                    tracing::info!("refused a connect from {}: {status}", origin.from);
                    link.complete(id, status, result.into())?;
                }
            }
        }
    }
}

fn complete_connect(
    link: &mut Link,
    id: u16,
    controller: &Controller,
    flow_control: bool,
    authenticate: bool,
) -> io::Result<()> {
    let required = if authenticate { fabrics::connect::AUTHENTICATION_REQUIRED } else { 0 };
    link.reserve(AROUND_DATA)?;
    link.push_capsule(Completion {
        result: u64::from(u32::from(controller.id) | required).into(),
        queue_head: if flow_control { 1 } else { fabrics::NO_FLOW_CONTROL }.into(),
        queue_id: 0.into(),
        command_id: id.into(),
        status: NvmeStatus::SUCCESS.to_field(),
    });
    link.flush()
}
