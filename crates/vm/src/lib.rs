//! QEMU guests whose memory is a region, or can be resized.
//!
//! QEMU is the distribution's, unmodified: it maps the region's file as the guest's memory, with
//! the library of crate `preload` preloaded. [`VmSpec`] describes a guest. [`process`] starts,
//! queries and stops VMs, [`memory`] grows and shrinks them, and [`migrate`] moves them. [`Qmp`]
//! speaks to QEMU, and [`Initrd`] makes the file system from which a guest without a disk boots.
//! [`definition`] has the files from which a host starts its VMs after a boot.

pub mod definition;
mod error;
pub mod initrd;
pub mod memory;
pub mod migrate;
mod node;
pub mod process;
mod processors;
mod qmp;
mod spec;

pub use error::VmError;
pub use initrd::Initrd;
pub use node::NodeChoice;
pub use processors::{Accelerator, Processors};
pub use qmp::Qmp;
pub use spec::{Backing, Boot, VmSpec};
