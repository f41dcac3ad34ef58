//! QEMU guests whose memory is a region, or is resized.
//!
//! QEMU is the distribution's, unmodified: it maps the region's file as the guest's memory, with the library of crate `shim` preloaded.
//! [`VmSpec`] says what a guest is to be like, [`process`] starts one and asks about it, [`memory`] grows and shrinks it, [`Qmp`] speaks with its QEMU, [`Initrd`] is what a guest
//! without a disk boots from.

mod error;
pub mod initrd;
mod meminfo;
pub mod memory;
pub mod migrate;
pub mod process;
mod qmp;
mod spec;

pub use error::GuestError;
pub use initrd::Initrd;
pub use qmp::Qmp;
pub use spec::{Accelerator, Backing, VmSpec};
