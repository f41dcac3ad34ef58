//! Live migration of a VM to another host (\[Jo20\], section 3.3).
//!
//! The supervisors at source and destination exchange messages (`message.rs`). Each also speaks to
//! its QEMU and to the engine of the VM's region.
//!
//! 0. The destination refuses a VM that it cannot run: a processor with fewer features (`cpu.rs`),
//!    before it waits for the source, or QEMU of another release.
//! 1. Rounds run while the VM runs, until little is left to do.
//! 2. QEMU stops the VM. The remaining dirty pages, the region's tables and the device state are
//!    sent. Both hosts now have everything.
//! 3. The source's supervisor records that the VM belongs to the destination. That record alone
//!    decides which host owns the VM. The supervisor tells the destination, with retries, and the
//!    destination resumes the VM.
//!
//! If the destination's QEMU exits as the VM is resumed, the destination does not take the VM.
//! Nothing of it has been written to the pool by then, and the source still has it.
//!
//! A destination that has everything but the hand-over waits. The VM stays paused there until the
//! hand-over arrives, or an operator decides.
//!
//! If rounds do not converge, or none are wanted, step 2 leaves the dirty pages behind (post-copy).
//! The VM then runs at the destination, and its memory follows; the pages that it waits for come
//! first (`postcopy.rs`). Until all pages have arrived the VM needs both hosts.

mod cpu;
mod destination;
mod message;
mod postcopy;
mod source;
#[cfg(test)]
mod tests;
mod wire;

pub use cpu::Cpu;
pub(crate) use destination::{Outcome, check_cpu, take_in};
pub use message::{Arrival, HandedOver, Incoming, Link, MigrationReport, Mode, Order, Progress};
pub(crate) use postcopy::{fetch_all, serve_all};
pub(crate) use source::{migrate, resume};
pub(crate) use wire::Wire;
