//! The processes of a VM: QEMU, and a keeper that waits for its end and then takes its region away.

mod asked;
pub mod client;
mod files;
mod message;
mod run;

pub use files::Files;
pub use message::{Origin, State, Status};
pub use run::{SUBCOMMAND, run};
