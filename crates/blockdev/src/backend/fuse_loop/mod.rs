//! The backend that needs no uncommon module: a FUSE file under a loop device.
//!
//! The FUSE file system is never attached to the mount tree. The loop device holds its only file,
//! so nothing has to be unmounted if the process dies.

mod ballast;
mod loop_device;
mod server;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use aquifer_transport::poll_token::PollToken;
use fuser::{Config, Session, SessionACL};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

use self::ballast::{Arrivals, Watch};
use self::loop_device::LoopDevice;
use self::server::{Server, WARM_UP_NAME};
use super::{Attached, Backend, BackendKind, MAX_REQUEST, Options, absent, exclusive};
use crate::{DeviceError, Disk};

const FUSE_DEVICE: &str = "/dev/fuse";

/// Time that the kernel may take to release the file after the loop device's last close.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// The FUSE + loop backend.
#[derive(Debug)]
pub struct FuseLoop;

impl Backend for FuseLoop {
    fn kind(&self) -> BackendKind {
        BackendKind::FuseLoop
    }

    fn probe(&self) -> Result<(), String> {
        [(FUSE_DEVICE, "fuse"), (loop_device::CONTROL, "loop")].into_iter().try_for_each(
            |(path, module)| match OpenOptions::new().read(true).write(true).open(path) {
                Ok(_) => Ok(()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Err(absent(module, path)),
                Err(error) => Err(format!("the kernel's {module} driver cannot be used: {error}")),
            },
        )
    }

    fn attach(
        &self,
        disk: Arc<dyn Disk>,
        options: &Options,
    ) -> Result<Box<dyn Attached>, DeviceError> {
        let fuse = OpenOptions::new()
            .read(true)
            .write(true)
            .open(FUSE_DEVICE)
            .map_err(DeviceError::failed(format!("cannot open {FUSE_DEVICE}")))?;
        let root = mount(&fuse).map_err(DeviceError::failed("cannot create a FUSE file system"))?;
        let arrivals = Arc::new(Arrivals::default());
        let workers = serve(disk, fuse.into(), options, arrivals.clone())?;
        warm_up(&root, threads(options))
            .map_err(DeviceError::failed("the FUSE workers did not start"))?;
        let file = open_in(&root, &options.label)
            .map_err(DeviceError::failed("cannot open the volume's FUSE file"))?;
        let device = LoopDevice::bind(file.as_fd(), &options.label)?;
        let watch = Watch::start(device.path(), arrivals)
            .map_err(DeviceError::failed("cannot set up the memory reserve"))?;
        Ok(Box::new(FuseLoopDevice { device, workers, _watch: watch }))
    }
}

/// Creates a FUSE file system outside the mount tree. The file system lives as long as its root or
/// one of its files is open.
fn mount(fuse: &File) -> io::Result<OwnedFd> {
    let context = rustix::mount::fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let fd = fuse.as_raw_fd().to_string();
    let settings = [
        ("source", "aquifer"),
        ("fd", &fd),
        ("rootmode", "040700"),
        ("user_id", "0"),
        ("group_id", "0"),
    ];
    for (key, value) in settings {
        rustix::mount::fsconfig_set_string(context.as_fd(), key, value)?;
    }
    rustix::mount::fsconfig_create(context.as_fd())?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC
        | MountAttrFlags::MOUNT_ATTR_NOATIME;
    Ok(rustix::mount::fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

/// Returns the number of threads that serve the file.
fn threads(options: &Options) -> usize {
    options.workers + options.spare
}

/// Starts the FUSE session with its worker threads.
fn serve(
    disk: Arc<dyn Disk>,
    fuse: OwnedFd,
    options: &Options,
    arrivals: Arc<Arrivals>,
) -> Result<Workers, DeviceError> {
    let poll_token = Arc::new(PollToken::default());
    let mut config = Config::default();
    config.n_threads = Some(threads(options));
    config.clone_fd = true;
    let session = Session::from_fd(
        Server::new(disk, threads(options), options.label.clone(), poll_token.clone(), arrivals),
        fuse,
        SessionACL::All,
        config,
    )
    .map_err(DeviceError::failed("the FUSE handshake with the kernel failed"))?;
    let (ends, ended) = mpsc::channel();
    thread::Builder::new()
        .name("fuse-session".to_owned())
        .spawn(move || {
            // The send fails if the device was dropped without a detach, as that drops the
            // receiver.
            let _ = ends.send(session.run().or_else(orderly));
        })
        .map_err(DeviceError::failed("cannot start the FUSE workers"))?;
    Ok(Workers { poll_token, ended })
}

/// Treats an aborted connection as an orderly end.
///
/// The kernel ends the connection when its last file is closed. A waiting worker then gets either
/// ENODEV, which the session itself takes for the end, or ECONNABORTED.
fn orderly(error: io::Error) -> io::Result<()> {
    if error.raw_os_error() == Some(libc::ECONNABORTED) { Ok(()) } else { Err(error) }
}

/// Sends every worker one write of the largest size; see [`Server::warm_up`].
fn warm_up(root: &OwnedFd, workers: usize) -> io::Result<()> {
    let file = &open_in(root, WARM_UP_NAME)?;
    let data = &vec![0; MAX_REQUEST];
    thread::scope(|scope| {
        let writes: Vec<_> = (0..workers)
            .map(|worker| {
                scope.spawn(move || file.write_all_at(data, (worker * MAX_REQUEST) as u64))
            })
            .collect();
        writes.into_iter().try_for_each(|write| {
            write.join().unwrap_or_else(|_| Err(io::Error::other("a warm-up thread panicked")))
        })
    })
}

fn open_in(root: &OwnedFd, name: &str) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::DIRECT;
    Ok(File::from(rustix::fs::openat(root, name, flags, Mode::empty())?))
}

#[derive(Debug)]
struct FuseLoopDevice {
    device: LoopDevice,
    workers: Workers,
    _watch: Watch,
}

/// Handle on the threads that serve the file.
#[derive(Debug)]
struct Workers {
    poll_token: Arc<PollToken>,
    /// Receives the session's result. It is disconnected once the session thread has ended.
    ended: Receiver<io::Result<()>>,
}

impl Drop for Workers {
    /// Wakes workers that wait for the token: the end of the session does not wake them.
    fn drop(&mut self) {
        self.poll_token.end();
    }
}

impl Attached for FuseLoopDevice {
    fn kind(&self) -> BackendKind {
        BackendKind::FuseLoop
    }

    fn path(&self) -> &Path {
        self.device.path()
    }

    fn detach(&mut self) -> Result<(), DeviceError> {
        self.device.release()?;
        self.workers.poll_token.end();
        match self.workers.ended.recv_timeout(RELEASE_TIMEOUT) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => {
                Err(DeviceError::failed("the FUSE server ended with an error")(error))
            }
            Err(RecvTimeoutError::Disconnected) => Ok(()),
            Err(RecvTimeoutError::Timeout) => {
                self.device.hold_again();
                Err(exclusive::busy(self.path()))
            }
        }
    }
}
