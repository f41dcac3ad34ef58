//! A volume as a kernel block device, and swap on it.
//!
//! - [`backend`] turns a [`Disk`] into a block device: ublk, nbd, or a FUSE file under a loop
//!   device.
//! - [`nvme`] configures the kernel's NVMe over Fabrics initiator and target.
//! - [`swap`] formats, activates and deactivates swap on a device.
//! - [`process`] runs the process that does all this for one volume.
//! - [`safety`] holds the rules for a process on which the kernel's reclaim waits.

pub mod backend;
mod disk;
mod error;
pub mod nvme;
pub mod process;
pub mod safety;
pub mod swap;
mod sys;

pub use backend::BackendKind;
pub use disk::Disk;
pub use error::DeviceError;
