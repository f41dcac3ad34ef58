//! The processes of a VM: QEMU, and its supervisor, which waits for QEMU's end and then removes the
//! VM's region.

mod asked;
pub mod client;
mod ended;
mod files;
mod keeper_call;
mod logs;
mod message;
mod run;
mod side_by_side;
mod stop;

pub use ended::{Cause, Ended, ended};
pub use files::Files;
pub use message::{Origin, State, Status};
pub use run::{SUBCOMMAND, run};
pub use side_by_side::side_by_side;
