//! The processes of a VM: QEMU, and its supervisor, which waits for QEMU's end and then removes the
//! VM's region.

pub mod client;
mod control_server;
mod disks;
mod ended;
mod files;
mod logs;
mod message;
mod receiving;
mod release;
mod rest;
mod run;
mod side_by_side;
mod standing;
mod stop;
mod supervisor_call;

pub(crate) use disks::release as release_disks;
pub use disks::{cache_needed, has_cache};
pub use ended::{Cause, Ended, ended};
pub use files::Files;
pub use message::{Access, Origin, State, Transit, VmStatus};
pub use receiving::clear_arrivals;
pub use rest::NextStart;
pub use run::{SUBCOMMAND, run};
pub use side_by_side::side_by_side;
pub use standing::{Standing, dirty, standings};
