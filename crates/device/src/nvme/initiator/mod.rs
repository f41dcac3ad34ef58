//! Device backend `nvme`: the kernel's initiator, straight to one lender.
//!
//! [`connect()`] writes one line to `/dev/nvme-fabrics`, as `nvme connect` does, and the kernel makes a [`Controller`] with a block
//! device. Who made it may die: the controller stays, and is found again by the names of subsystem and host
//! ([`Controller::find`]). [`attach()`] does all of it, swap included, and leaves a [`Record`] by which [`detach()`] undoes it.

mod attach;
mod connect;
mod controller;
mod host;
mod kernel_log;
mod record;
mod refusal;

pub use self::attach::{Wish, attach, detach};
pub use self::connect::{Options, connect};
pub use self::controller::Controller;
pub use self::host::HostIdentity;
pub use self::record::Record;
