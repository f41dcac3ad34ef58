//! Moving a VM to another host (Migration, section 3.3).
//!
//! Its keeper here and one there speak with each other (`message.rs`), each with the VM's QEMU and with the engine of its region:
//!
//! 0. The destination refuses what it could not run: another release of QEMU, or a processor that offers less (`cpu.rs`).
//! 1. Rounds, while the VM runs, until little is left to do.
//! 2. QEMU stops the VM. What is dirty still, what is known of the region and the state of the devices go over. Both sides have all now.
//! 3. The keeper here notes that the VM is the other host's: from then on it is, whatever happens. Before that it was this host's, whatever
//!    happened. It tells the other keeper, again and again if need be, and that has the VM run.
//!
//! A host whose QEMU ends as the VM is to go on there does not take it: nothing of it went to the pool by then, and the host that it left has it still.
//!
//! A keeper there that has all, but has not been told, waits: the VM stands still there until the word comes, or an operator says that it will not.
//!
//! Where rounds do not come to an end, or none are wanted, what is dirty is left behind in step 2 (post-copy): the VM runs there first, and its memory
//! comes after it, what it waits for before all else (`left.rs`). Until all has come the VM needs both hosts.

mod cpu;
mod destination;
mod left;
mod message;
mod source;
#[cfg(test)]
mod tests;
mod wire;

pub(crate) use destination::{Outcome, take_in};
pub(crate) use left::{fetch_all, serve_all};
pub use message::{Arrival, Awaited, Given, Link, Mode, Order, Progress, Report};
pub(crate) use source::{migrate, resume};
pub(crate) use wire::Wire;
