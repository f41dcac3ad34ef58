//! Connect commands.

use std::mem::offset_of;
use std::sync::Arc;
use std::time::Duration;

use aquifer_transport::serving::Origin;
use zerocopy::FromBytes;

use super::controller::{ADMIN, Controller};
use super::data::{Source, source};
use super::link::Link;
use super::parse::Payload;
use super::{Core, Host, MAX_QUEUE, Refused};
use crate::proto::fabrics::{ANY_CONTROLLER, Connect, ConnectData, connect};
use crate::proto::{Command, Nqn, NvmeStatus};

/// A queue with an accepted Connect that is not completed yet.
pub(super) struct Connected {
    pub(super) seat: Seat,
    /// Entries of the queue.
    pub(super) size: u32,
    pub(super) flow_control: bool,
    /// The keep alive timeout; `None` if the host sends no Keep Alives.
    pub(super) keep_alive: Option<Duration>,
}

/// A queue's membership in its controller, left on drop; the admin queue's drop ends the
/// controller.
pub(super) struct Seat {
    core: Arc<Core>,
    pub(super) controller: Arc<Controller>,
    pub(super) queue: u16,
}

impl Drop for Seat {
    fn drop(&mut self) {
        if self.queue == ADMIN {
            self.controller.end();
            self.core.registry.remove(self.controller.id);
        } else {
            self.controller.leave(self.queue);
        }
    }
}

/// The status and the result of a refused Connect.
pub(super) struct Rejected(pub(super) NvmeStatus, pub(super) u32);

impl From<NvmeStatus> for Rejected {
    fn from(status: NvmeStatus) -> Self {
        Self(status, 0)
    }
}

/// Refuses a Connect because of the field at this offset of the command.
fn wrong_in_command(offset: usize) -> Rejected {
    Rejected(NvmeStatus::CONNECT_INVALID.final_(), offset as u32)
}

/// Refuses a Connect because of the field at this offset of its data.
fn wrong_in_data(offset: usize) -> Rejected {
    Rejected(NvmeStatus::CONNECT_INVALID.final_(), offset as u32 | connect::IN_DATA)
}

/// Offsets of fields in the command, in bytes.
const QUEUE: usize = 42;
const SIZE: usize = 44;

/// Checks a Connect command, and makes the controller if the queue is an admin queue (Base, section
/// 6.3 "Connect command").
pub(super) fn accept(
    core: &Arc<Core>,
    link: &Link,
    command: &Command,
    payload: Payload,
    origin: &Origin,
) -> Result<Connected, Rejected> {
    let Source::Here(payload) = source(command, payload, size_of::<ConnectData>())? else {
        return Err(NvmeStatus::SGL_TYPE_INVALID.final_().into());
    };
    let wanted = Connect::of(command);
    if wanted.format != 0 {
        return Err(NvmeStatus::CONNECT_FORMAT.final_().into());
    }
    let Ok(data) = ConnectData::read_from_bytes(link.data(payload)) else {
        return Err(NvmeStatus::DATA_LENGTH_INVALID.final_().into());
    };
    let nqn = |field, offset| Nqn::from_field(field).map_err(|_| wrong_in_data(offset));
    let subsystem = nqn(&data.subsystem, offset_of!(ConnectData, subsystem))?;
    let host = Host {
        nqn: nqn(&data.host, offset_of!(ConnectData, host))?,
        id: data.host_id,
        local: origin.local,
        from: origin.from.clone(),
    };
    let size = u32::from(wanted.size) + 1;
    if !(2..=MAX_QUEUE).contains(&size) {
        return Err(wrong_in_command(SIZE));
    }
    let controller = if wanted.queue == ADMIN {
        if data.controller_id.get() != ANY_CONTROLLER {
            return Err(wrong_in_data(offset_of!(ConnectData, controller_id)));
        }
        make_controller(core, subsystem, host)?
    } else {
        let Some(controller) = core.registry.get(data.controller_id.get()) else {
            return Err(wrong_in_data(offset_of!(ConnectData, controller_id)));
        };
        check_association(&controller, &subsystem, &host)?;
        if controller.is_discovery() || wanted.queue > core.limits.queues {
            return Err(wrong_in_command(QUEUE));
        }
        let socket = link.socket.try_clone().map_err(|_| NvmeStatus::INTERNAL_ERROR)?;
        controller.join(wanted.queue, socket)?;
        controller
    };
    let seat = Seat { core: Arc::clone(core), controller, queue: wanted.queue };
    let keep_alive =
        (wanted.keep_alive > 0).then(|| Duration::from_millis(wanted.keep_alive.into()));
    let flow_control = wanted.attributes & connect::NO_FLOW_CONTROL == 0;
    Ok(Connected { seat, size, flow_control, keep_alive })
}

fn make_controller(core: &Core, subsystem: Nqn, host: Host) -> Result<Arc<Controller>, Rejected> {
    let namespace = if subsystem.is_discovery() {
        None
    } else {
        Some(core.subsystems.open(&subsystem, &host).map_err(|refused| {
            tracing::info!("refused subsystem {subsystem} to {host}: {refused}");
            match refused {
                Refused::Unknown(_) => wrong_in_data(offset_of!(ConnectData, subsystem)),
                Refused::Forbidden(_) => NvmeStatus::CONNECT_INVALID_HOST.final_().into(),
            }
        })?)
    };
    match core.registry.create(subsystem, host, namespace.clone()) {
        Ok(Some(controller)) => {
            if let Some(namespace) = namespace {
                namespace.watch(&controller);
            }
            Ok(controller)
        }
        Ok(None) => Err(NvmeStatus::CONNECT_BUSY.into()),
        Err(error) => {
            tracing::warn!("cannot create a controller: {error}");
            Err(NvmeStatus::INTERNAL_ERROR.into())
        }
    }
}

/// Checks that an I/O queue comes from the host that made the controller, and for the same
/// subsystem (Base, section 6.3 "Connect command").
fn check_association(
    controller: &Controller,
    subsystem: &Nqn,
    host: &Host,
) -> Result<(), Rejected> {
    if controller.subsystem != *subsystem {
        return Err(wrong_in_data(offset_of!(ConnectData, subsystem)));
    }
    if controller.host.nqn != host.nqn || controller.host.id != host.id {
        return Err(NvmeStatus::CONNECT_INVALID_HOST.final_().into());
    }
    Ok(())
}
