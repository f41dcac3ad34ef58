//! The ways in which a [`Disk`] becomes a block device.

pub(crate) mod exclusive;
mod fuse_loop;
mod nbd;
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

/// The largest read or write that one request may carry. Swap writes up to 128 KiB; twice that keeps ordinary use
/// of the device fast while a worker's buffer stays small, for it is locked in memory.
const MAX_REQUEST: usize = 256 << 10;

/// A way to attach a disk to the kernel, or the choice of one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BackendKind {
    /// The first of the others that the kernel has.
    #[default]
    Auto,
    /// The kernel's ublk driver over io_uring.
    Ublk,
    /// The kernel's nbd driver over a socket pair.
    Nbd,
    /// A FUSE file under a loop device; needs no module that distributions leave out.
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

/// How a disk is attached.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads that serve requests, at least one.
    pub workers: usize,
    /// Threads beside them, for requests that come while others wait long. The disk is called with worker indexes below the sum.
    /// ublk has none: its driver gives each request to a queue, and so to a thread, before it is known which is free.
    pub spare: usize,
    /// What the device is marked with where the driver keeps a mark, so that it can be found again.
    pub label: String,
}

/// One way to make a block device.
///
/// Implementations MUST leave nothing in the kernel when `attach` fails, and MUST have every worker ready (its
/// buffers touched, its index given) when `attach` returns.
pub trait Backend: Send + Sync {
    /// Which one it is.
    fn kind(&self) -> BackendKind;

    /// Whether the kernel has what it takes; otherwise what is missing and, after a semicolon, the way out.
    fn probe(&self) -> Result<(), String>;

    /// Makes a block device of `disk`.
    fn attach(
        &self,
        disk: Arc<dyn Disk>,
        options: &Options,
    ) -> Result<Box<dyn Attached>, DeviceError>;
}

/// A block device that serves a disk until it is detached. Dropping it gives up this process's use of it; the
/// device itself goes when its last user does.
pub trait Attached: Send + fmt::Debug {
    /// By which backend.
    fn kind(&self) -> BackendKind;

    /// The device node.
    fn path(&self) -> &Path;

    /// Takes the device away and waits until the kernel is done with it. Refused with [`DeviceError::Busy`] while
    /// swap, a mount or a program uses it; the device then goes on as before.
    fn detach(&mut self) -> Result<(), DeviceError>;
}

/// All backends, the one to prefer first.
pub fn backends() -> [&'static dyn Backend; 3] {
    [&Ublk, &Nbd, &FuseLoop]
}

/// Whether a backend can be used on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// The backend.
    pub kind: BackendKind,
    /// What is missing and, after a semicolon, the way out; absent where it can be used.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub missing: Option<String>,
}

/// What each backend has to say about this host, the one to prefer first.
pub fn probe() -> Vec<Probe> {
    backends().map(|backend| Probe { kind: backend.kind(), missing: usable(backend).err() }).into()
}

/// Whether a backend can be used by this process: all of them answer programs that may then not make a device.
fn usable(backend: &dyn Backend) -> Result<(), String> {
    if !capabilities(None).is_ok_and(|held| held.effective.contains(CapabilitySet::SYS_ADMIN)) {
        return Err(
            "it takes CAP_SYS_ADMIN; run as root (containers: --cap-add SYS_ADMIN)".to_owned()
        );
    }
    backend.probe()
}

/// What is missing where the driver of a module does not show itself at `place`.
fn absent(module: &str, place: &str) -> String {
    match Module::find(&Root::default(), module) {
        Module::Loaded => {
            format!("the kernel's {module} driver cannot be reached; give this process {place}")
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

/// The backend asked for, or the first that can be used here.
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

/// Whether the device is attached and marked with `label` ([`Options::label`]).
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

/// The device that is attached and marked with `label`, and by which backend.
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

/// Makes a device usable for its removal after its server has died: requests that would wait for a server fail. To be kept
/// until nobody uses the device.
pub(crate) fn release_dead(
    device: &Path,
    kind: BackendKind,
) -> Result<Option<Box<dyn Attached>>, DeviceError> {
    match kind {
        BackendKind::Ublk => ublk::release_dead(device).map(Some),
        BackendKind::Auto | BackendKind::Nbd | BackendKind::FuseLoop => Ok(None),
    }
}
