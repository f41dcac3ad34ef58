//! The Connect command, which makes a connection a queue of a controller.

use std::time::Duration;

use aquifer_transport::initiating::Deadline;
use zerocopy::{FromZeros, IntoBytes};

use super::execute::Executor;
use super::link::Link;
use super::{Failure, Target, authenticate};
use crate::proto::Command;
use crate::proto::command::{FABRICS, Sgl};
use crate::proto::fabrics::{Connect, ConnectData, connect, kind};

/// The queue to connect, and its controller.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queue {
    /// The controller; [`ANY_CONTROLLER`](crate::proto::fabrics::ANY_CONTROLLER) for an admin
    /// queue.
    pub(super) controller: u16,
    /// The queue's number; 0 is the admin queue.
    pub(super) number: u16,
    /// Entries of the queue.
    pub(super) size: u32,
    /// For an admin queue: the keep alive timeout, after which a silent host may lose its
    /// controller.
    pub(super) keep_alive: Duration,
}

/// Connects a queue, authenticates where the target demands that, and returns the controller's
/// identifier.
///
/// The command names the host, the subsystem, and for an I/O queue its controller (Base, section
/// 6.3 "Connect command").
pub(super) fn connect(
    target: &Target,
    queue: Queue,
    deadline: Deadline,
) -> Result<(Link, u16), Failure> {
    let mut link = Link::connect(target, deadline)?;
    let mut executor = Executor::new(&mut link, deadline);
    let wanted = Connect {
        format: 0,
        queue: queue.number,
        size: (queue.size - 1) as u16,
        attributes: connect::NO_FLOW_CONTROL,
        keep_alive: queue.keep_alive.as_millis() as u32,
    };
    let mut data = ConnectData::new_zeroed();
    data.host_id = target.host_id;
    data.controller_id = queue.controller.into();
    data.subsystem = target.subsystem.to_field();
    data.host = target.host.to_field();
    let sgl = Sgl::in_capsule(size_of::<ConnectData>() as u32);
    let command = wanted.put(Command::new(FABRICS, 0, kind::CONNECT.into(), sgl));
    let (completion, _) = executor.execute(command, data.as_bytes(), &mut [])?;
    if !completion.status().is_success() {
        return Err(Failure::from_connect(&completion, target));
    }
    let result = completion.result.get() as u32;
    if result & connect::SECURE_CHANNEL_REQUIRED != 0 {
        return Err(Failure::Refused(
            "it demands TLS, which this initiator does not support".to_owned(),
        ));
    }
    let required = result & connect::AUTHENTICATION_REQUIRED != 0;
    match &target.secrets {
        Some(secrets) if required => authenticate::run(&mut executor, target, secrets)?,
        None if required => {
            let why = format!("the target requires it: give the secret of host {}", target.host);
            return Err(Failure::Authentication(why));
        }
        Some(secrets) if secrets.controller.is_some() => {
            let why = "this host requires it of the target, but the target does not authenticate";
            return Err(Failure::Authentication(why.to_owned()));
        }
        _ => {}
    }
    Ok((link, result as u16))
}
