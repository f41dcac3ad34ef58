//! The kernel's own initiator and target of NVMe over Fabrics. No Aquifer process carries a page.
//!
//! The backends of [`crate::backend`] make a block device of a [`Disk`](crate::Disk), which is a
//! volume over any number of leases. Here the kernel itself speaks to one lender, over TCP or RDMA:
//!
//! - [`initiator`] attaches one subsystem of a lender as a block device (`attach = "direct"`), and
//!   detaches it.
//! - [`target`] lends RAM of this host as a subsystem (lease backend `kernel`), and removes
//!   leftovers of a crash.
//! - [`network`] tells whether swap over the network is safe.
//!
//! All operations go through files of the kernel. They take a [`Root`], so that tests can run them
//! on a directory that imitates those files.

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
