//! The kernel's own two ends of NVMe over Fabrics: no process of ours carries a page.
//!
//! The backends of [`crate::backend`] make a block device of a [`Disk`](crate::Disk), which is a volume over any number of leases.
//! Here the kernel itself speaks to one lender, over TCP or RDMA:
//!
//! - [`initiator`] attaches one subsystem of one lender as a block device (`attach = "direct"`), and takes it away again.
//! - [`target`] lends RAM of this host as a subsystem (lease backend `kernel`), and sweeps up what a crash left.
//! - [`network`] tells whether swap over the network in between is safe.
//!
//! Everything is done through files of the kernel, so all of it takes a [`Root`] and is tested against a directory that looks
//! like one.

mod error;
pub mod initiator;
pub mod network;
mod root;
pub mod target;
mod transport;
mod uri;

pub use self::error::NvmeError;
pub use self::root::Root;
pub use self::transport::{Module, Transport};
pub use self::uri::{SubsystemUri, UriError};
