//! The kernel's ublk driver: requests and answers through io_uring, one queue and one thread a worker.
//!
//! When the server dies, the driver keeps the device and lets requests wait for another server. [`release_dead`] is that
//! other one: it fails them all, so that swap on the device can be turned off and the device removed.

mod control;
mod queue;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use aquifer_page::Bytes;

use self::control::{Driver, Info};
use super::{Attached, Backend, BackendKind, Options, absent, exclusive};
use crate::{DeviceError, Disk};

/// Requests under way a queue. A worker serves one at a time; the others wait where they cost a buffer, not a wake-up.
const DEPTH: u16 = 16;

/// How long the driver may take for a step.
const PATIENCE: Duration = Duration::from_secs(10);

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
        // The driver takes no more queues than there are processors.
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

/// What fits of a label into the driver's record of a device (FNV-1a).
fn mark(label: &str) -> u64 {
    label.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// The number in `/dev/ublkbN`.
fn number(path: &Path) -> Option<u32> {
    path.file_name()?.to_str()?.strip_prefix("ublkb")?.parse().ok()
}

/// Whether the device is marked with `label`.
pub(super) fn is_marked(path: &Path, label: &str) -> bool {
    let info = || Driver::open().ok()?.info(number(path)?).ok();
    info().is_some_and(|info| info.mark == mark(label))
}

/// Takes over a device whose server has died: every request to it fails from then on. Dropping what this returns, when
/// nobody uses the device any more, removes it.
pub(super) fn release_dead(path: &Path) -> Result<Box<dyn Attached>, DeviceError> {
    let fail =
        || DeviceError::failed(format!("cannot take over {} from its dead server", path.display()));
    let mut driver = Driver::open().map_err(fail())?;
    let info = number(path)
        .ok_or(io::ErrorKind::NotFound.into())
        .and_then(|number| driver.info(number))
        .map_err(fail())?;
    let deadline = Instant::now() + PATIENCE;
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

/// What is left of a volume whose server has died.
struct Dead;

impl Disk for Dead {
    fn capacity(&self) -> Bytes {
        Bytes::ZERO
    }

    fn read(&self, _worker: usize, _offset: u64, _data: &mut [u8]) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EIO))
    }

    fn write(&self, _worker: usize, _offset: u64, _data: &[u8]) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EIO))
    }

    fn discard(&self, _worker: usize, _offset: u64, _len: u64) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EIO))
    }

    fn flush(&self, _worker: usize) -> io::Result<()> {
        Ok(())
    }
}

struct UblkDevice {
    path: PathBuf,
    info: Info,
    driver: Driver,
    workers: Vec<JoinHandle<io::Result<()>>>,
    /// Whether the device is still ours; when not, its number may be somebody else's already.
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
        let deadline = Instant::now() + PATIENCE;
        while !self.path.exists() {
            if Instant::now() > deadline {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "its device node did not appear",
                ));
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Starts a worker for each queue and waits until all can serve.
    fn serve(&mut self, disk: &Arc<dyn Disk>) -> io::Result<()> {
        let device = Arc::new(control::open_queues(self.info.device)?);
        let (ready, all_ready) = mpsc::channel();
        for queue in 0..self.info.queues {
            let (disk, device, ready, depth) =
                (disk.clone(), device.clone(), ready.clone(), self.info.depth);
            self.workers.push(thread::Builder::new().name(format!("ublk-{queue}")).spawn(
                move || {
                    queue::run(&*disk, device, queue, depth, |prepared| _ = ready.send(prepared))
                },
            )?);
        }
        for _ in 0..self.info.queues {
            all_ready
                .recv_timeout(PATIENCE)
                .unwrap_or_else(|error| Err(io::Error::other(error)))?;
        }
        Ok(())
    }

    /// Removes the device, whoever uses it.
    fn remove(&mut self) -> io::Result<()> {
        self.up = false;
        let stopped = self.driver.stop(self.info.device);
        for worker in self.workers.drain(..) {
            // What a worker ended with does not matter any more.
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
        // The device is deleted when the last who has it open has closed it, so this must be closed before that.
        drop(exclusive::open(&self.path)?);
        self.remove().map_err(DeviceError::failed(format!("cannot detach {}", self.path.display())))
    }
}

impl Drop for UblkDevice {
    /// Detaches a device that nobody holds. One that is held stays, and its workers with it.
    fn drop(&mut self) {
        if self.up && (!self.path.exists() || exclusive::open(&self.path).is_ok()) {
            let _ = self.remove();
        }
    }
}
