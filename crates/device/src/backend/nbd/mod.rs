//! The kernel's nbd driver, over socket pairs whose other ends we serve: one connection, one hardware queue and one
//! thread a worker.

mod serve;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_fabric::nbd::proto::export_flag;
use aquifer_page::PAGE_SIZE;

use super::exclusive::{self, Exclusive};
use super::{Attached, Backend, BackendKind, MAX_REQUEST, Options};
use crate::sys::{self, nbd_control as control};
use crate::{DeviceError, Disk};

/// How long the driver may take to bring a device up or down.
const PATIENCE: Duration = Duration::from_secs(10);

/// The nbd backend.
#[derive(Debug)]
pub struct Nbd;

impl Backend for Nbd {
    fn kind(&self) -> BackendKind {
        BackendKind::Nbd
    }

    fn probe(&self) -> Result<(), String> {
        if candidates().next().is_none() {
            return Err("there is no /dev/nbd0; load the module with 'modprobe nbd'".to_owned());
        }
        match free_candidates().next() {
            Some(_) => Ok(()),
            None => Err("all nbd devices are in use; load the module with a larger 'nbds_max'".to_owned()),
        }
    }

    fn attach(&self, disk: Arc<dyn Disk>, options: &Options) -> Result<Box<dyn Attached>, DeviceError> {
        let (path, ends) = free_candidates()
            .find_map(|path| match set_up(&path, &*disk, options.workers) {
                // Somebody took it after we looked.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => None,
                Ok((device, ends)) => Some(start(path, device, ends, &disk)),
                Err(error) => {
                    Some(Err(DeviceError::failed(format!("cannot set up {}", path.display()))(error)))
                }
            })
            .ok_or_else(|| DeviceError::Unavailable {
                kind: BackendKind::Nbd,
                why: "all nbd devices are in use; load the module with a larger 'nbds_max'".to_owned(),
            })??;
        let device = NbdDevice { path, ends };
        device.wait_until_up(disk.capacity().0)?;
        Ok(Box::new(device))
    }
}

/// All nbd devices of the kernel, in order.
fn candidates() -> impl Iterator<Item = PathBuf> {
    (0..).map(|number| PathBuf::from(format!("/dev/nbd{number}"))).take_while(|path| path.exists())
}

fn free_candidates() -> impl Iterator<Item = PathBuf> {
    candidates().filter(|path| !sysfs(path, "pid").exists())
}

fn sysfs(device: &Path, attribute: &str) -> PathBuf {
    let mut path = PathBuf::from("/sys/block");
    path.extend(device.file_name());
    path.join(attribute)
}

/// Gives the driver the size and one end of each connection; returns the device and our ends.
///
/// The driver wants all of this from one thread, and forgets it when the device is closed before it is started.
fn set_up(path: &Path, disk: &dyn Disk, workers: usize) -> io::Result<(File, Vec<UnixStream>)> {
    let device = OpenOptions::new().read(true).write(true).open(path)?;
    let flags = export_flag::HAS_FLAGS
        | export_flag::SEND_FLUSH
        | export_flag::SEND_TRIM
        | export_flag::SEND_WRITE_ZEROES
        | export_flag::CAN_MULTI_CONN;
    let mut ours = Vec::with_capacity(workers);
    for _ in 0..workers {
        let (our, theirs) = UnixStream::pair()?;
        // The driver takes a reference of its own to the socket.
        sys::ioctl_number(&device, control::SET_SOCKET, theirs.as_raw_fd() as libc::c_ulong)?;
        ours.push(our);
    }
    sys::ioctl_number(&device, control::SET_BLOCK_SIZE, PAGE_SIZE as libc::c_ulong)?;
    sys::ioctl_number(&device, control::SET_SIZE_BLOCKS, disk.capacity().pages())?;
    sys::ioctl_number(&device, control::SET_FLAGS, flags.into())?;
    Ok((device, ours))
}

type Ends = Receiver<io::Result<()>>;

/// Starts the workers, then the device.
fn start(
    path: PathBuf,
    device: File,
    connections: Vec<UnixStream>,
    disk: &Arc<dyn Disk>,
) -> Result<(PathBuf, Ends), DeviceError> {
    let fail = |what: &str| DeviceError::failed(format!("cannot start {} ({what})", path.display()));
    let workers = connections.len();
    let (ready, all_ready) = mpsc::channel();
    for (worker, connection) in connections.into_iter().enumerate() {
        let (disk, ready) = (disk.clone(), ready.clone());
        thread::Builder::new()
            .name(format!("nbd-{worker}"))
            .spawn(move || serve::run(&*disk, worker, connection, |prepared| _ = ready.send(prepared)))
            .map_err(fail("worker"))?;
    }
    drop(ready);
    for _ in 0..workers {
        let prepared = all_ready.recv_timeout(PATIENCE).unwrap_or_else(|error| Err(io::Error::other(error)));
        prepared.map_err(fail("worker"))?;
    }

    let (end, ends) = mpsc::channel();
    thread::Builder::new()
        .name("nbd-driver".to_owned())
        .spawn(move || {
            // A signal that reached this thread would end the device.
            sys::block_signals();
            let ended = sys::ioctl_number(&device, control::DO_IT, 0);
            let cleared = sys::ioctl_number(&device, control::CLEAR_SOCKET, 0);
            drop(device);
            // Nobody listens any more when the device was dropped rather than detached.
            let _ = end.send(ended.and(cleared).map(drop));
        })
        .map_err(fail("driver thread"))?;
    Ok((path, ends))
}

#[derive(Debug)]
struct NbdDevice {
    path: PathBuf,
    ends: Ends,
}

impl NbdDevice {
    /// Waits until the driver has started the device, then keeps its requests within a worker's buffer.
    fn wait_until_up(&self, capacity: u64) -> Result<(), DeviceError> {
        let deadline = Instant::now() + PATIENCE;
        let sectors = (capacity / 512).to_string();
        let up = || {
            let size = fs::read_to_string(sysfs(&self.path, "size")).unwrap_or_default();
            sysfs(&self.path, "pid").exists() && size.trim() == sectors
        };
        while !up() {
            if let Ok(Err(error)) = self.ends.try_recv() {
                return Err(DeviceError::failed(format!("{} did not start", self.path.display()))(error));
            }
            if Instant::now() > deadline {
                return Err(DeviceError::failed(format!("{} did not start", self.path.display()))(
                    io::ErrorKind::TimedOut.into(),
                ));
            }
            thread::sleep(Duration::from_millis(1));
        }
        let limit = sysfs(&self.path, "queue/max_sectors_kb");
        fs::write(&limit, (MAX_REQUEST >> 10).to_string())
            .map_err(DeviceError::failed(format!("cannot set {}", limit.display())))
    }
}

impl Attached for NbdDevice {
    fn kind(&self) -> BackendKind {
        BackendKind::Nbd
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn detach(&mut self) -> Result<(), DeviceError> {
        let fail = || DeviceError::failed(format!("cannot detach {}", self.path.display()));
        let Exclusive(device) = exclusive::open(&self.path)?;
        sys::ioctl_number(&device, control::DISCONNECT, 0).map_err(fail())?;
        drop(device);
        match self.ends.recv_timeout(PATIENCE) {
            Ok(result) => result.map_err(fail()),
            Err(error) => Err(fail()(io::Error::other(error))),
        }
    }
}

impl Drop for NbdDevice {
    /// While it is in use the driver thread keeps it up; otherwise it goes. Detaching twice is harmless.
    fn drop(&mut self) {
        if sysfs(&self.path, "pid").exists() {
            let _ = self.detach();
        }
    }
}
