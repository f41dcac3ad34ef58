//! Device backend `nvme`: the kernel's initiator, connected to one lender.
//!
//! [`connect()`] writes one line to `/dev/nvme-fabrics`, as `nvme connect` does, and the kernel
//! makes a [`Controller`] with a block device. The controller outlives the process that made it;
//! [`Controller::find`] finds it by the NQNs of subsystem and host. [`attach()`] does all steps,
//! including swap, and leaves a [`Record`] with which [`detach()`] undoes them.

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
