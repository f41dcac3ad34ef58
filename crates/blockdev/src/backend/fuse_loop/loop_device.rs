//! A loop device over the FUSE file: binding, checking and releasing it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use crate::DeviceError;
use crate::backend::exclusive;
use crate::sys::loop_control::{self, FLAG_AUTOCLEAR, FLAG_DIRECT_IO, Info};

pub(super) const CONTROL: &str = "/dev/loop-control";

const BLOCK_SIZE: u32 = 4096;

/// Attempts at a free loop device. Another process may take the device that the kernel named before
/// this process binds it. More failures than this in a row are a fault.
const ATTEMPTS: usize = 64;

/// A loop device bound to a file. The kernel unbinds it when its last user closes it.
///
/// Its users are swap, mounts, programs that have it open, and this value. It therefore stays while
/// this process lives. If the process is killed, the device goes unless it has another user.
#[derive(Debug)]
pub(super) struct LoopDevice {
    path: PathBuf,
    handle: Option<File>,
}

impl LoopDevice {
    /// Binds `backing` to a free loop device and marks it with `name`, of which the kernel keeps 63
    /// bytes.
    pub(super) fn bind(backing: BorrowedFd<'_>, name: &str) -> Result<Self, DeviceError> {
        let control =
            open(CONTROL).map_err(DeviceError::failed(format!("cannot open {CONTROL}")))?;
        let mut info = Info { flags: FLAG_AUTOCLEAR | FLAG_DIRECT_IO, ..Info::ZERO };
        let kept = name.len().min(info.file_name.len() - 1);
        info.file_name[..kept].copy_from_slice(&name.as_bytes()[..kept]);

        for _ in 0..ATTEMPTS {
            let number = loop_control::get_free(&control)
                .map_err(DeviceError::failed("cannot get a free loop device"))?;
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = open(&path)
                .map_err(DeviceError::failed(format!("cannot open {}", path.display())))?;
            match loop_control::configure(&device, backing, BLOCK_SIZE, info) {
                Ok(()) => return Self::check(path, device),
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
                Err(error) => {
                    return Err(DeviceError::failed(format!(
                        "cannot bind the volume to {}",
                        path.display()
                    ))(error));
                }
            }
        }
        Err(DeviceError::Failed {
            what: format!("cannot get a loop device: other programs took it {ATTEMPTS} times"),
            source: io::ErrorKind::ResourceBusy.into(),
        })
    }

    /// Fails if the loop driver refused direct I/O. Without it, the driver serves one request at a
    /// time, which is too slow.
    fn check(path: PathBuf, device: File) -> Result<Self, DeviceError> {
        let info = loop_control::status(&device)
            .map_err(DeviceError::failed(format!("cannot read the state of {}", path.display())))?;
        if info.flags & FLAG_DIRECT_IO == 0 {
            return Err(DeviceError::Failed {
                what: format!("{} refused direct I/O on the volume's file", path.display()),
                source: io::ErrorKind::Unsupported.into(),
            });
        }
        Ok(Self { path, handle: Some(device) })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Closes this process's handle, so that the kernel unbinds the device at its last close.
    ///
    /// # Errors
    ///
    /// Returns [`DeviceError::Busy`] while swap, a mount or a program holds the device.
    pub(super) fn release(&mut self) -> Result<(), DeviceError> {
        let _exclusive = exclusive::open(&self.path)?;
        self.handle = None;
        Ok(())
    }

    /// Opens the device again after a release that did not unbind it.
    pub(super) fn hold_again(&mut self) {
        self.handle = open(&self.path).ok();
    }
}

fn open(path: impl AsRef<Path>) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}
