//! The backends that turn a [`Disk`] into a block device.

pub(crate) mod exclusive;
mod fuse_loop;
mod nbd;
mod starting;
mod ublk;

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::thread::{CapabilitySet, capabilities};
use serde::{Deserialize, Serialize};

pub use self::fuse_loop::FuseLoop;
pub use self::nbd::Nbd;
pub use self::ublk::Ublk;
use crate::nvme::{Module, Root};
use crate::{DeviceError, Disk};

/// Largest read or write in one request, in bytes. Swap writes at most 128 KiB. Twice that keeps
/// other use of the device fast, while the worker's buffer, which is locked in memory, stays small.
const MAX_REQUEST: usize = 256 << 10;

/// A backend, or the choice of one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BackendKind {
    /// The first backend that works on this host, in the order of [`backends`].
    #[default]
    Auto,
    /// The kernel's ublk driver over io_uring.
    Ublk,
    /// The kernel's nbd driver over a socket pair.
    Nbd,
    /// A FUSE file under a loop device. It needs no module that distributions leave out.
    FuseLoop,
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Auto => "auto",
            Self::Ublk => "ublk",
            Self::Nbd => "nbd",
            Self::FuseLoop => "fuse-loop",
        })
    }
}

/// Parameters of an attachment.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of threads that serve requests, at least one.
    pub workers: usize,
    /// Number of extra threads for requests that arrive while the other threads wait. Worker
    /// indexes passed to the disk are below `workers + spare`. ublk ignores this value: its driver
    /// assigns each request to a queue, and so to a thread, without knowing which thread is free.
    pub spare: usize,
    /// Mark written to the driver's record of the device, by which the device can be found again.
    pub label: String,
}

/// One way to make a block device.
///
/// If `attach` fails, an implementation MUST leave nothing in the kernel. When `attach` returns,
/// every worker MUST be ready: its buffers resident and its index assigned.
pub trait Backend: Send + Sync {
    /// Returns the kind of this backend.
    fn kind(&self) -> BackendKind;

    /// Checks that the kernel supports this backend. The error names the missing part and, after a
    /// semicolon, the remedy.
    fn probe(&self) -> Result<(), String>;

    /// Makes a block device that `disk` serves.
    fn attach(
        &self,
        disk: Arc<dyn Disk>,
        options: &Options,
    ) -> Result<Box<dyn Attached>, DeviceError>;
}

/// A block device that serves a disk until it is detached. Dropping this value closes this
/// process's handle; the device itself goes at its last close.
pub trait Attached: Send + fmt::Debug {
    /// Returns the kind of the backend that made this device.
    fn kind(&self) -> BackendKind;

    /// Returns the path of the device node.
    fn path(&self) -> &Path;

    /// Detaches the device and waits until the kernel has released it.
    ///
    /// # Errors
    ///
    /// Returns [`DeviceError::Busy`] while swap, a mount or a program uses the device, which then
    /// stays attached. Returns [`DeviceError::Failed`] if the kernel cannot remove it.
    fn detach(&mut self) -> Result<(), DeviceError>;
}

/// Returns all backends in order of preference.
pub fn backends() -> [&'static dyn Backend; 3] {
    [&Ublk, &Nbd, &FuseLoop]
}

/// Result of probing one backend on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// The probed backend.
    pub kind: BackendKind,
    /// The missing part and, after a semicolon, the remedy; `None` if the backend can be used.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub missing: Option<String>,
}

/// Probes every backend on this host, in order of preference.
pub fn probe() -> Vec<Probe> {
    backends().map(|backend| Probe { kind: backend.kind(), missing: usable(backend).err() }).into()
}

/// Checks that this process can use `backend`. Every driver answers a probe without
/// `CAP_SYS_ADMIN`, but then refuses to make a device; so this function checks the capability
/// first.
fn usable(backend: &dyn Backend) -> Result<(), String> {
    if !capabilities(None).is_ok_and(|held| held.effective.contains(CapabilitySet::SYS_ADMIN)) {
        return Err(
            "it needs CAP_SYS_ADMIN; run as root (containers: --cap-add SYS_ADMIN)".to_owned()
        );
    }
    backend.probe()
}

/// Says why the driver of `module` is not reachable at `place`, and how to remedy that.
fn absent(module: &str, place: &str) -> String {
    match Module::find(&Root::default(), module) {
        Module::Loaded => {
            format!("this process cannot reach the kernel's {module} driver; let it access {place}")
        }
        Module::Available => {
            format!("the kernel's {module} driver is not loaded; modprobe {module}")
        }
        Module::Missing => {
            format!(
                "the kernel has no {module} driver; use a kernel that has it, or another backend"
            )
        }
    }
}

/// Returns the backend `kind`, or for [`BackendKind::Auto`] the first that works here.
///
/// # Errors
///
/// Returns [`DeviceError::Unavailable`] with the reasons if no such backend can be used.
pub fn choose(kind: BackendKind) -> Result<&'static dyn Backend, DeviceError> {
    let mut reasons = Vec::new();
    for backend in backends() {
        if kind != BackendKind::Auto && kind != backend.kind() {
            continue;
        }
        match usable(backend) {
            Ok(()) => return Ok(backend),
            Err(why) => reasons.push(format!("{}: {why}", backend.kind())),
        }
    }
    Err(DeviceError::Unavailable { kind, why: reasons.join("; ") })
}

/// Tells whether `device` is attached and marked with `label` ([`Options::label`]).
pub fn is_marked(device: &Path, label: &str) -> bool {
    let Some(name) = device.file_name() else { return false };
    let directory = Path::new("/sys/block").join(name);
    let shown = ["loop/backing_file", "backend"]
        .iter()
        .find_map(|attribute| fs::read_to_string(directory.join(attribute)).ok());
    match shown {
        Some(text) => text.trim().trim_start_matches('/') == label,
        None => ublk::is_marked(device, label),
    }
}

/// Finds the attached device marked with `label`, and its backend.
pub(crate) fn find(label: &str) -> io::Result<Option<(PathBuf, BackendKind)>> {
    for entry in fs::read_dir("/sys/block")? {
        let name = entry?.file_name();
        let kinds = [
            ("loop", BackendKind::FuseLoop),
            ("nbd", BackendKind::Nbd),
            ("ublk", BackendKind::Ublk),
        ];
        let kind = kinds.iter().find(|(start, _)| name.to_string_lossy().starts_with(start));
        let device = Path::new("/dev").join(&name);
        if let Some((_, kind)) = kind
            && is_marked(&device, label)
        {
            return Ok(Some((device, *kind)));
        }
    }
    Ok(None)
}

/// Prepares a device for removal after its server has died: pending requests fail instead of
/// waiting for another server. The caller keeps the returned value until the device has no users.
pub(crate) fn release_dead(
    device: &Path,
    kind: BackendKind,
) -> Result<Option<Box<dyn Attached>>, DeviceError> {
    match kind {
        BackendKind::Ublk => ublk::release_dead(device).map(Some),
        BackendKind::Auto | BackendKind::Nbd | BackendKind::FuseLoop => Ok(None),
    }
}
