//! The kernel's ublk driver: requests and replies through io_uring, with one queue per worker.
//!
//! When the server dies, the driver keeps the device and holds requests for another server.
//! [`release_dead`] takes over as that server and fails all requests. Swap on the device can then
//! be turned off and the device removed.

mod control;
mod queue;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, WorkerId};

use self::control::{Driver, Info};
use super::starting::{TIMEOUT, start_workers, wait_for_node};
use super::{Attached, Backend, BackendKind, Options, absent, exclusive};
use crate::{DeviceError, Disk};

/// Requests in flight per queue. A worker serves one at a time. The others cost a buffer each while
/// they wait, but no wake-up.
const DEPTH: u16 = 16;

/// The ublk backend.
#[derive(Debug)]
pub struct Ublk;

impl Backend for Ublk {
    fn kind(&self) -> BackendKind {
        BackendKind::Ublk
    }

    fn probe(&self) -> Result<(), String> {
        match Driver::open() {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(absent("ublk_drv", control::PATH))
            }
            Err(error) => Err(format!("the kernel's ublk driver cannot be used: {error}")),
        }
    }

    fn attach(
        &self,
        disk: Arc<dyn Disk>,
        options: &Options,
    ) -> Result<Box<dyn Attached>, DeviceError> {
        let fail = |what: &'static str| DeviceError::failed(what);
        let mut driver = Driver::open().map_err(fail("cannot reach the kernel's ublk driver"))?;
        // The driver accepts at most one queue per processor.
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let queues = options.workers.min(processors) as u16;
        let info = driver
            .add(queues, DEPTH, mark(&options.label))
            .map_err(fail("cannot get a ublk device"))?;
        let mut device = UblkDevice {
            path: control::node(info.device),
            info,
            driver,
            workers: Vec::new(),
            up: true,
        };
        device
            .start(&disk)
            .map_err(DeviceError::failed(format!("{} did not start", device.path.display())))?;
        Ok(Box::new(device))
    }
}

/// Hashes a label to the 64 bits that the driver stores for a device (FNV-1a).
fn mark(label: &str) -> u64 {
    label.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// Returns the number N of `/dev/ublkbN`.
fn number(path: &Path) -> Option<u32> {
    path.file_name()?.to_str()?.strip_prefix("ublkb")?.parse().ok()
}

/// Tells whether the device is marked with `label`.
pub(super) fn is_marked(path: &Path, label: &str) -> bool {
    let info = || Driver::open().ok()?.info(number(path)?).ok();
    info().is_some_and(|info| info.mark == mark(label))
}

/// Takes over the device of a dead server. Every request to it fails from then on. Dropping the
/// returned value removes the device, unless another process still uses it.
pub(super) fn release_dead(path: &Path) -> Result<Box<dyn Attached>, DeviceError> {
    let fail =
        || DeviceError::failed(format!("cannot take over {} from its dead server", path.display()));
    let mut driver = Driver::open().map_err(fail())?;
    let info = number(path)
        .ok_or(io::ErrorKind::NotFound.into())
        .and_then(|number| driver.info(number))
        .map_err(fail())?;
    let deadline = Instant::now() + TIMEOUT;
    while let Err(error) = driver.start_recovery(info.device) {
        if error.raw_os_error() != Some(libc::EBUSY) || Instant::now() > deadline {
            return Err(fail()(error));
        }
        thread::sleep(Duration::from_millis(10));
    }
    let mut device =
        UblkDevice { path: path.to_owned(), info, driver, workers: Vec::new(), up: true };
    let disk: Arc<dyn Disk> = Arc::new(Dead);
    device.serve(&disk).and_then(|()| device.driver.end_recovery(info.device)).map_err(fail())?;
    Ok(Box::new(device))
}

/// Disk of a volume after its server has died: reads, writes and discards fail.
struct Dead;

impl Disk for Dead {
    fn capacity(&self) -> Bytes {
        Bytes::ZERO
    }

    fn read(&self, _worker: WorkerId, _offset: u64, _data: &mut [u8]) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EIO))
    }

    fn write(&self, _worker: WorkerId, _offset: u64, _data: &[u8]) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EIO))
    }

    fn discard(&self, _worker: WorkerId, _offset: u64, _len: u64) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EIO))
    }

    fn flush(&self, _worker: WorkerId) -> io::Result<()> {
        Ok(())
    }
}

struct UblkDevice {
    path: PathBuf,
    info: Info,
    driver: Driver,
    workers: Vec<JoinHandle<io::Result<()>>>,
    /// Cleared once this process has removed the device. Its number may then belong to another
    /// process.
    up: bool,
}

impl std::fmt::Debug for UblkDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UblkDevice").field("path", &self.path).finish_non_exhaustive()
    }
}

impl UblkDevice {
    fn start(&mut self, disk: &Arc<dyn Disk>) -> io::Result<()> {
        self.driver.set_size(self.info.device, disk.capacity().0)?;
        self.serve(disk)?;
        self.driver.start(self.info.device)?;
        wait_for_node(&self.path)
    }

    /// Starts a worker for each queue and waits until all can serve.
    fn serve(&mut self, disk: &Arc<dyn Disk>) -> io::Result<()> {
        let device = Arc::new(control::open_queues(self.info.device)?);
        let Info { queues, depth, .. } = self.info;
        start_workers("ublk", queues.into(), &mut self.workers, |worker, ready| {
            let (disk, device) = (disk.clone(), device.clone());
            move || queue::run(&*disk, device, worker.0 as u16, depth, |done| _ = ready.send(done))
        })
    }

    /// Removes the device even if it is in use.
    fn remove(&mut self) -> io::Result<()> {
        self.up = false;
        let stopped = self.driver.stop(self.info.device);
        for worker in self.workers.drain(..) {
            // The device is removed in any case, so a worker's error has no consequence.
            let _ = worker.join();
        }
        stopped.and(self.driver.delete(self.info.device))
    }
}

impl Attached for UblkDevice {
    fn kind(&self) -> BackendKind {
        BackendKind::Ublk
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn detach(&mut self) -> Result<(), DeviceError> {
        // The driver deletes the device only after its last close, so this handle must be closed
        // first.
        drop(exclusive::open(&self.path)?);
        self.remove().map_err(DeviceError::failed(format!("cannot detach {}", self.path.display())))
    }
}

impl Drop for UblkDevice {
    /// Removes the device if it is not in use. A device in use stays, and its workers with it.
    fn drop(&mut self) {
        if self.up && (!self.path.exists() || exclusive::open(&self.path).is_ok()) {
            let _ = self.remove();
        }
    }
}
