//! Swap on a block device: formatting, swapon, swapoff and usage.

mod header;
mod room;

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use aquifer_page::Bytes;
pub use aquifer_procfs::swaps::{Swap, swaps, usage};
use serde::{Deserialize, Serialize};

pub use self::header::format;
pub(crate) use self::room::check_room;
use crate::sys;

/// Interval of progress reports during swapoff.
const PROGRESS_PERIOD: Duration = Duration::from_millis(100);

const SWAP_FLAG_PREFER: i32 = 0x8000;
const SWAP_FLAG_DISCARD: i32 = 0x10000;

/// The highest priority that the kernel takes.
pub const MAX_PRIORITY: u16 = 0x7fff;

/// The reason why swap could not be formatted, turned on or turned off, with the device and the
/// remedy.
#[derive(Debug, thiserror::Error)]
pub enum SwapError {
    /// The device cannot be formatted.
    #[error("cannot write a swap header to {}: {source}", .device.display())]
    Format {
        /// The device.
        device: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The priority is above [`MAX_PRIORITY`].
    #[error("swap priority {0} is too high: the kernel accepts 0 to 32767")]
    Priority(u16),
    /// The kernel refused to swap to the device.
    #[error("cannot turn on swap on {}: {source}; {help}", .device.display())]
    On {
        /// The device.
        device: PathBuf,
        /// The kernel's error.
        source: io::Error,
        /// The remedy.
        help: &'static str,
    },
    /// The swapped-out pages do not fit into memory and other swap.
    #[error(
        "cannot turn off swap on {}: its {used} does not fit into memory and other swap; \
         end some programs, raise the cgroup's memory limit, or add other swap first",
        .device.display()
    )]
    NoRoom {
        /// The device, on which swap is still on.
        device: PathBuf,
        /// Bytes on the device at the time of the attempt.
        used: Bytes,
    },
    /// The kernel refused to turn swap off for another reason.
    #[error("cannot turn off swap on {}: {source}; {help}", .device.display())]
    Off {
        /// The device.
        device: PathBuf,
        /// The kernel's error.
        source: io::Error,
        /// The remedy.
        help: &'static str,
    },
}

impl SwapError {
    /// Returns the errno of the kernel's error, if there is one.
    pub(crate) fn errno(&self) -> Option<i32> {
        match self {
            Self::Format { source, .. } | Self::On { source, .. } | Self::Off { source, .. } => {
                source.raw_os_error()
            }
            Self::NoRoom { .. } => Some(libc::ENOMEM),
            Self::Priority(_) => Some(libc::EINVAL),
        }
    }
}

/// Progress of a swapoff.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Bytes still on the device.
    pub remaining: Bytes,
    /// Bytes on the device at the start.
    pub total: Bytes,
}

/// Turns on swap on a formatted device. The kernel discards freed pages, so that lenders get their
/// memory back.
///
/// With `None` the kernel assigns a priority below all other swap devices.
pub fn on(device: &Path, priority: Option<u16>) -> Result<(), SwapError> {
    let mut flags = SWAP_FLAG_DISCARD;
    if let Some(priority) = priority {
        if priority > MAX_PRIORITY {
            return Err(SwapError::Priority(priority));
        }
        flags |= SWAP_FLAG_PREFER | i32::from(priority);
    }
    c_string(device).and_then(|path| sys::swapon(&path, flags)).map_err(|source| {
        let help = match source.raw_os_error() {
            Some(libc::EPERM) => {
                "this needs root (CAP_SYS_ADMIN), and a free slot among the kernel's swap devices"
            }
            Some(libc::EBUSY) => "it is swap already, or a file system on it is mounted",
            Some(libc::EINVAL) => "it has no swap header, or one for another page size",
            _ => "see the kernel's log",
        };
        SwapError::On { device: device.to_owned(), source, help }
    })
}

/// Turns off swap on a device. Returns once all its pages are back in memory or in other swap.
///
/// Calls `progress` about ten times a second. If the kernel refuses, swap on the device is still
/// on.
///
/// # Caller
/// If memory runs out meanwhile, the kernel kills *the process that calls swapoff* first, whatever
/// its `oom_score_adj`. The process that serves the device must therefore not call this function.
pub fn off(device: &Path, mut progress: impl FnMut(Progress)) -> Result<(), SwapError> {
    let fail =
        |source| SwapError::Off { device: device.to_owned(), source, help: "see the kernel's log" };
    let path = c_string(device).map_err(fail)?;
    let total = usage(device).map_err(fail)?.unwrap_or_default();
    let (done, result) = mpsc::channel();
    thread::Builder::new()
        .name("swapoff".to_owned())
        .spawn(move || {
            // The receiver is gone only if /proc/swaps became unreadable.
            let _ = done.send(swapoff(&path));
        })
        .map_err(fail)?;
    loop {
        match result.recv_timeout(PROGRESS_PERIOD) {
            Ok(result) => return result.map_err(|source| off_error(device, total, source)),
            Err(RecvTimeoutError::Timeout) => {
                let remaining = usage(device).map_err(fail)?.unwrap_or_default();
                progress(Progress { remaining, total });
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(fail(io::Error::other("the swapoff thread died")));
            }
        }
    }
}

/// Retries after a signal, which interrupts swapoff while pages are still on the device.
fn swapoff(path: &CString) -> io::Result<()> {
    loop {
        match sys::swapoff(path) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Classifies the error of a swapoff; `used` is the number of bytes on the device.
pub(crate) fn off_error(device: &Path, used: Bytes, source: io::Error) -> SwapError {
    let device = device.to_owned();
    let help = match source.raw_os_error() {
        Some(libc::ENOMEM) => return SwapError::NoRoom { device, used },
        Some(libc::EINVAL) => "it is not swap (see /proc/swaps)",
        Some(libc::EPERM) => "this needs root (CAP_SYS_ADMIN)",
        _ => "see the kernel's log",
    };
    SwapError::Off { device, source, help }
}

fn c_string(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::ErrorKind::InvalidInput.into())
}
