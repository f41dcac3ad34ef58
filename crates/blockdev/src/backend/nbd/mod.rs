//! The kernel's nbd driver, over a socket pair; this process serves the other end.
//!
//! There is one connection for all workers. For each connection the driver keeps a work item that
//! waits for replies. When memory is short, the kernel is slow to start threads for work items. One
//! rescuer thread then runs all items in sequence. It blocks in the first item, so requests on a
//! second connection would never complete.

mod netlink;
mod serve;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_nbd::proto::export_flag;
use aquifer_page::PAGE_SIZE;

use self::netlink::{Connect, Driver};
use self::serve::Connection;
use super::starting::{start_workers, wait_for_node};
use super::{Attached, Backend, BackendKind, MAX_REQUEST, Options, absent, exclusive};
use crate::{DeviceError, Disk};

/// Seconds without a reply after which the driver gives up a connection. It is a year, as good as
/// never: the disk has a timeout of its own, and the driver must not repeat a slow request.
const DRIVER_TIMEOUT: u64 = 365 * 24 * 3600;

const FLAGS: u16 = export_flag::HAS_FLAGS
    | export_flag::SEND_FLUSH
    | export_flag::SEND_TRIM
    | export_flag::SEND_WRITE_ZEROES;

/// The nbd backend.
#[derive(Debug)]
pub struct Nbd;

impl Backend for Nbd {
    fn kind(&self) -> BackendKind {
        BackendKind::Nbd
    }

    fn probe(&self) -> Result<(), String> {
        match Driver::open() {
            Ok(_) => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                Err(absent("nbd", "the host's network namespace"))
            }
            Err(error) => Err(format!("the kernel's nbd driver does not answer: {error}")),
        }
    }

    fn attach(
        &self,
        disk: Arc<dyn Disk>,
        options: &Options,
    ) -> Result<Box<dyn Attached>, DeviceError> {
        let mut driver =
            Driver::open().map_err(DeviceError::failed("cannot reach the kernel's nbd driver"))?;
        let size = disk.capacity().0;
        let end =
            serve(&disk, options).map_err(DeviceError::failed("the nbd workers did not start"))?;
        let connect = Connect {
            size,
            block_size: PAGE_SIZE as u64,
            timeout: DRIVER_TIMEOUT,
            flags: FLAGS,
            label: &options.label,
            socket: end.as_fd(),
        };
        let index =
            driver.connect(&connect).map_err(DeviceError::failed("cannot get an nbd device"))?;
        let mut device = NbdDevice {
            path: PathBuf::from(format!("/dev/nbd{index}")),
            index,
            driver,
            handle: None,
            up: true,
        };
        device
            .hold()
            .map_err(DeviceError::failed(format!("{} did not come up", device.path.display())))?;
        Ok(Box::new(device))
    }
}

/// Starts all workers, the spare ones too: any free worker reads the next request. Returns the
/// driver's end of their connection.
fn serve(disk: &Arc<dyn Disk>, options: &Options) -> io::Result<UnixStream> {
    let (ours, theirs) = UnixStream::pair()?;
    let connection = Arc::new(Connection::new(ours));
    let mut detached = Vec::new();
    let count = options.workers + options.spare;
    start_workers("nbd", count, &mut detached, |worker, ready| {
        let (disk, connection) = (disk.clone(), connection.clone());
        move || serve::run(&*disk, worker, &connection, |done| _ = ready.send(done))
    })?;
    Ok(theirs)
}

#[derive(Debug)]
struct NbdDevice {
    path: PathBuf,
    index: u32,
    driver: Driver,
    /// Handle that keeps the device up: the driver disconnects at the last close.
    handle: Option<File>,
    /// Cleared once this process has disconnected the device. Its number may then belong to another
    /// process.
    up: bool,
}

impl NbdDevice {
    fn sysfs(&self, attribute: &str) -> PathBuf {
        PathBuf::from(format!("/sys/block/nbd{}/{attribute}", self.index))
    }

    /// Opens the device, so that it stays up, and limits requests to the size of a worker's buffer.
    fn hold(&mut self) -> io::Result<()> {
        wait_for_node(&self.path)?;
        self.handle = Some(OpenOptions::new().read(true).write(true).open(&self.path)?);
        fs::write(self.sysfs("queue/max_sectors_kb"), (MAX_REQUEST >> 10).to_string())
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
        let _exclusive = exclusive::open(&self.path)?;
        self.driver
            .disconnect(self.index)
            .map_err(DeviceError::failed(format!("cannot detach {}", self.path.display())))?;
        self.up = false;
        self.handle = None;
        Ok(())
    }
}

impl Drop for NbdDevice {
    /// Disconnects a device that was never opened. The driver disconnects an opened one at its last
    /// close.
    fn drop(&mut self) {
        if self.up && self.handle.is_none() {
            let _ = self.driver.disconnect(self.index);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::io::{Read as _, Write as _};
    use std::sync::{Condvar, Mutex};
    use std::time::Duration;

    use aquifer_nbd::proto::{REQUEST_MAGIC, Request, SimpleReply, command};
    use aquifer_page::{Bytes, WorkerId};
    use aquifer_transport::sleep::going_to_sleep;
    use zerocopy::{FromZeros as _, IntoBytes as _};

    use super::*;

    /// A disk with its upper half on a lender that does not answer until it is thawed.
    #[derive(Default)]
    struct HalfFrozen {
        thawed: Mutex<bool>,
        thaw: Condvar,
    }

    const HALF: u64 = 1 << 20;

    impl Disk for HalfFrozen {
        fn capacity(&self) -> Bytes {
            Bytes(2 * HALF)
        }

        fn read(&self, _worker: WorkerId, offset: u64, data: &mut [u8]) -> io::Result<()> {
            going_to_sleep();
            if offset >= HALF {
                let thawed = self.thawed.lock().unwrap();
                drop(self.thaw.wait_while(thawed, |thawed| !*thawed).unwrap());
            }
            data.fill(7);
            Ok(())
        }

        fn write(&self, _worker: WorkerId, _offset: u64, _data: &[u8]) -> io::Result<()> {
            Ok(())
        }

        fn discard(&self, _worker: WorkerId, _offset: u64, _len: u64) -> io::Result<()> {
            Ok(())
        }

        fn flush(&self, _worker: WorkerId) -> io::Result<()> {
            Ok(())
        }
    }

    fn ask(mut driver: &UnixStream, cookie: u64, offset: u64) {
        let mut request = Request::new_zeroed();
        request.magic = REQUEST_MAGIC.into();
        request.command = command::READ.into();
        request.cookie = cookie.into();
        request.offset = offset.into();
        request.length = (PAGE_SIZE as u32).into();
        driver.write_all(request.as_bytes()).unwrap();
    }

    /// Reads the next reply and returns its cookie.
    fn answered(mut driver: &UnixStream) -> u64 {
        let (mut reply, mut page) = (SimpleReply::new_zeroed(), [0; PAGE_SIZE]);
        driver.read_exact(reply.as_mut_bytes()).unwrap();
        driver.read_exact(&mut page).unwrap();
        assert_eq!((reply.error.get(), page), (0, [7; PAGE_SIZE]));
        reply.cookie.get()
    }

    #[test]
    fn a_silent_lender_does_not_keep_the_pages_of_others() {
        let half = Arc::new(HalfFrozen::default());
        let disk: Arc<dyn Disk> = half.clone();
        let options = Options { workers: 2, spare: 6, label: "a test".to_owned() };
        let driver = serve(&disk, &options).unwrap();
        driver.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let waiting = 7;
        (0..waiting).for_each(|cookie| ask(&driver, cookie, HALF));
        for cookie in 100..200 {
            ask(&driver, cookie, 0);
            assert_eq!(answered(&driver), cookie);
        }
        *half.thawed.lock().unwrap() = true;
        half.thaw.notify_all();
        let mut late: Vec<_> = (0..waiting).map(|_| answered(&driver)).collect();
        late.sort_unstable();
        assert!(late.into_iter().eq(0..waiting));
    }
}
