//! Swap on a block device: the header, on and off, and who uses how much.

mod header;
mod room;
mod table;

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};

pub use self::header::format;
pub(crate) use self::room::check_room;
pub use self::table::{Swap, swaps, usage};
use crate::sys;

/// How often progress is reported while pages come back.
const PROGRESS_PERIOD: Duration = Duration::from_millis(100);

const SWAP_FLAG_PREFER: i32 = 0x8000;
const SWAP_FLAG_DISCARD: i32 = 0x10000;

/// The highest priority the kernel takes.
pub const MAX_PRIORITY: u16 = 0x7fff;

/// Why swap could not be made, turned on or turned off. Each names the device and the way out.
#[derive(Debug, thiserror::Error)]
pub enum SwapError {
    /// The device cannot be formatted.
    #[error("cannot write a swap header to {}: {source}", .device.display())]
    Format {
        /// The device.
        device: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A priority above [`MAX_PRIORITY`].
    #[error("swap priority {0} is too high: the kernel takes 0 to 32767")]
    Priority(u16),
    /// The kernel refused to swap to the device.
    #[error("cannot turn on swap on {}: {source}; {help}", .device.display())]
    On {
        /// The device.
        device: PathBuf,
        /// What the kernel said.
        source: io::Error,
        /// The way out.
        help: &'static str,
    },
    /// What was swapped out does not fit into memory and other swap.
    #[error(
        "cannot turn off swap on {}: its {used} do not fit into memory (the kernel ran out of it); \
         end some programs, raise the memory limit of the control group, or add other swap first",
        .device.display()
    )]
    NoRoom {
        /// The device, on which swap is still on.
        device: PathBuf,
        /// What it held when it was tried.
        used: Bytes,
    },
    /// The kernel refused to turn swap off for another reason.
    #[error("cannot turn off swap on {}: {source}; {help}", .device.display())]
    Off {
        /// The device.
        device: PathBuf,
        /// What the kernel said.
        source: io::Error,
        /// The way out.
        help: &'static str,
    },
}

impl SwapError {
    /// The number of the error that the kernel gave, if it was one.
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

/// How far a swapoff has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// What still has to come back into memory.
    pub remaining: Bytes,
    /// What the device held at the start.
    pub total: Bytes,
}

/// Turns on swap on a formatted device. What is freed is discarded, so that lenders get their memory back.
///
/// Without a priority the kernel gives one below those of all other swap devices.
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
                "this needs root (CAP_SYS_ADMIN), and a free place among the kernel's swap devices"
            }
            Some(libc::EBUSY) => "swap is on there already, or a file system on it is mounted",
            Some(libc::EINVAL) => "it has no swap header, or one for another page size",
            _ => "see the kernel's log",
        };
        SwapError::On { device: device.to_owned(), source, help }
    })
}

/// Turns off swap on a device; returns when all that it held is back in memory or in other swap.
///
/// `progress` is called about ten times a second. When this fails, swap on the device is still on.
///
/// # Who may call it
/// The kernel ends *the process that calls swapoff* first when memory runs out meanwhile, whatever its
/// `oom_score_adj` says. So the process that serves the device must leave this to another one.
pub fn off(device: &Path, mut progress: impl FnMut(Progress)) -> Result<(), SwapError> {
    let fail =
        |source| SwapError::Off { device: device.to_owned(), source, help: "see the kernel's log" };
    let path = c_string(device).map_err(fail)?;
    let total = usage(device).map_err(fail)?.unwrap_or_default();
    let (done, result) = mpsc::channel();
    thread::Builder::new()
        .name("swapoff".to_owned())
        .spawn(move || {
            // The receiver outlives this thread's work: it waits for exactly this message.
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

/// A signal interrupts swapoff half-way, with the rest of the pages still on the device: go on.
fn swapoff(path: &CString) -> io::Result<()> {
    loop {
        match sys::swapoff(path) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Sorts what swapoff failed with; `used` is what the device held.
pub(crate) fn off_error(device: &Path, used: Bytes, source: io::Error) -> SwapError {
    let device = device.to_owned();
    let help = match source.raw_os_error() {
        Some(libc::ENOMEM) => return SwapError::NoRoom { device, used },
        Some(libc::EINVAL) => "swap is not on there (see /proc/swaps)",
        Some(libc::EPERM) => "this needs root (CAP_SYS_ADMIN)",
        _ => "see the kernel's log",
    };
    SwapError::Off { device, source, help }
}

fn c_string(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::ErrorKind::InvalidInput.into())
}
