//! The ways in which a [`Disk`] becomes a block device.

mod fuse_loop;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use self::fuse_loop::FuseLoop;
use crate::{DeviceError, Disk};

/// A way to attach a disk to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A FUSE file under a loop device; needs no module that distributions leave out.
    FuseLoop,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::FuseLoop => "fuse-loop",
        })
    }
}

/// How a disk is attached.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads that serve requests, at least one; the disk is called with worker indexes below this.
    pub workers: usize,
    /// What the device is marked with where the driver keeps a mark, so that it can be found again.
    pub label: String,
}

/// One way to make a block device.
///
/// Implementations MUST leave nothing in the kernel when `attach` fails, and MUST have every worker ready (its
/// buffers touched, its index given) when `attach` returns.
pub trait Backend: Send + Sync {
    /// Which one it is.
    fn kind(&self) -> Kind;

    /// Whether the kernel has what it takes; otherwise what is missing and the way out.
    fn probe(&self) -> Result<(), String>;

    /// Makes a block device of `disk`.
    fn attach(&self, disk: Arc<dyn Disk>, options: &Options) -> Result<Box<dyn Attached>, DeviceError>;
}

/// A block device that serves a disk until it is detached. Dropping it gives up this process's use of it; the
/// device itself goes when its last user does.
pub trait Attached: Send + fmt::Debug {
    /// By which backend.
    fn kind(&self) -> Kind;

    /// The device node.
    fn path(&self) -> &Path;

    /// Takes the device away and waits until the kernel is done with it. Refused with [`DeviceError::Busy`] while
    /// swap, a mount or a program uses it; the device then goes on as before.
    fn detach(&mut self) -> Result<(), DeviceError>;
}
