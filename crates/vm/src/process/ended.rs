//! The record of the latest VMs that ended on a host, `RUN_DIR/ended-vms.json`, with times and
//! causes.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, SystemTime};

use aquifer_page::{HostName, RegionName};
use aquifer_region::process::{lock_file, record};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use super::stop::WITHDRAWAL;
use crate::error::VmError;

/// Ended VMs on record. Older ones are forgotten.
const MOST: usize = 100;

/// The signal that ends a process at once (signal(7)).
const SIGKILL: i32 = 9;

/// A VM that has ended on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// Name of the VM. A newer VM may have the same name.
    pub name: RegionName,
    /// When the VM ended, in milliseconds since the epoch.
    pub at_ms: u64,
    /// The cause of the end.
    pub cause: Cause,
    /// QEMU's exit status, if its parent saw it.
    pub status: Option<String>,
    /// QEMU's last messages.
    pub words: String,
}

/// The cause of a VM's end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "cause", rename_all = "snake_case")]
pub enum Cause {
    /// A command of this program ended the VM.
    Ordered {
        /// The command, as the operator gave it.
        order: String,
    },
    /// The VM moved to another host.
    Moved {
        /// The destination.
        to: HostName,
    },
    /// The guest powered itself off, or a client of the monitor made QEMU quit.
    PoweredOff,
    /// A signal asked QEMU to end.
    Terminated,
    /// A signal killed QEMU.
    Killed {
        /// The signal's number.
        signal: i32,
        /// Whether the kernel's out-of-memory killer sent it.
        out_of_memory: bool,
    },
    /// QEMU exited with an error.
    Failed,
    /// No process saw the end, because the supervisor was killed earlier.
    Unseen,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ordered { order } => write!(f, "'{order}' ended it"),
            Self::Moved { to } => write!(f, "it moved to host {to}"),
            Self::PoweredOff => f.write_str("the guest powered itself off"),
            Self::Terminated => f.write_str("a signal asked QEMU to quit"),
            Self::Killed { out_of_memory: true, .. } => f.write_str(
                "the kernel killed QEMU: this host, or QEMU's cgroup, was out of memory",
            ),
            Self::Killed { signal, .. } => write!(f, "signal {signal} killed QEMU"),
            Self::Failed => f.write_str("QEMU failed"),
            Self::Unseen => f.write_str("QEMU is gone, and no supervisor saw it exit"),
        }
    }
}

/// The facts about a VM's end.
pub(super) struct Found<'a> {
    pub(super) name: &'a RegionName,
    pub(super) pid: Option<u32>,
    pub(super) status: Option<ExitStatus>,
    pub(super) moved: Option<HostName>,
    /// The last order to end the VM.
    pub(super) order: Option<String>,
    pub(super) words: String,
}

impl Found<'_> {
    fn cause(&self) -> Cause {
        if let Some(to) = &self.moved {
            return Cause::Moved { to: to.clone() };
        }
        let ordered = self.order.clone().map(|order| Cause::Ordered { order });
        let Some(status) = self.status else { return ordered.unwrap_or(Cause::Unseen) };
        match (status.signal(), status.success()) {
            // `--force` kills a QEMU that does not answer.
            (Some(SIGKILL), _)
                if self
                    .order
                    .as_ref()
                    .is_some_and(|order| order.contains("--force") || order == WITHDRAWAL) =>
            {
                ordered.unwrap_or(Cause::Unseen)
            }
            (Some(signal), _) => {
                let out_of_memory = signal == SIGKILL && self.pid.is_some_and(is_out_of_memory);
                Cause::Killed { signal, out_of_memory }
            }
            (None, false) => Cause::Failed,
            (None, true) if self.words.contains("terminating on signal") => Cause::Terminated,
            (None, true) => ordered.unwrap_or(Cause::PoweredOff),
        }
    }

    /// Writes the end to the record and to the log.
    pub(super) fn note(self, run_dir: &Path) {
        let at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let ended = Ended {
            name: self.name.clone(),
            at_ms: at.as_millis() as u64,
            cause: self.cause(),
            status: self.status.map(|status| status.to_string()),
            words: self.words,
        };
        let status = ended.status.as_deref().unwrap_or("exit status unknown");
        tracing::info!("VM '{}' has ended: {} ({status})", ended.name, ended.cause);
        if let Err(error) = append(run_dir, ended) {
            tracing::warn!("cannot record the end of the VM: {error}");
        }
    }
}

fn append(run_dir: &Path, ended: Ended) -> io::Result<()> {
    let path = run_dir.join("ended-vms.json");
    let _lock = lock_file(&run_dir.join("ended-vms.lock"))?;
    // A damaged record is replaced.
    let mut all: Vec<Ended> = record::read(&path).ok().flatten().unwrap_or_default();
    all.push(ended);
    all.drain(..all.len().saturating_sub(MOST));
    record::write(&path, &all)
}

/// Returns the VMs on record that ended on this host after `since`, oldest first.
///
/// # Errors
/// [`VmError::Io`] if the record cannot be read.
pub fn ended(run_dir: &Path, since: SystemTime) -> Result<Vec<Ended>, VmError> {
    let path = run_dir.join("ended-vms.json");
    let read = record::read(&path).map_err(VmError::io(format!("cannot read {}", path.display())));
    let mut all: Vec<Ended> = read?.unwrap_or_default();
    all.retain(|ended| SystemTime::UNIX_EPOCH + Duration::from_millis(ended.at_ms) > since);
    Ok(all)
}

/// Returns whether the kernel's log says that the out-of-memory killer killed this process. False
/// also if the log cannot be read.
fn is_out_of_memory(pid: u32) -> bool {
    let flags = OFlags::NONBLOCK.bits() as i32;
    let Ok(mut log) = OpenOptions::new().read(true).custom_flags(flags).open("/dev/kmsg") else {
        return false;
    };
    let killed = format!("Killed process {pid} (");
    let mut buffer = [0; 8192];
    loop {
        match log.read(&mut buffer) {
            Ok(0) => return false,
            Ok(length) if String::from_utf8_lossy(&buffer[..length]).contains(&killed) => {
                return true;
            }
            Ok(_) => {}
            // The kernel has overwritten the next record: go on with the oldest one left.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::BrokenPipe | io::ErrorKind::Interrupted
                ) => {}
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    fn cause(status: Option<i32>, order: Option<&str>, words: &str) -> String {
        let found = Found {
            name: &"one".parse().unwrap(),
            pid: Some(u32::MAX),
            status: status.map(ExitStatus::from_raw),
            moved: None,
            order: order.map(str::to_owned),
            words: words.to_owned(),
        };
        found.cause().to_string()
    }

    #[test]
    fn a_vm_that_ends_leaves_word_of_why() {
        assert_eq!(cause(Some(0), None, ""), "the guest powered itself off");
        assert_eq!(cause(Some(0), Some("vm stop"), ""), "'vm stop' ended it");
        assert_eq!(cause(Some(9), None, ""), "signal 9 killed QEMU");
        assert_eq!(cause(Some(9), Some("vm stop"), ""), "signal 9 killed QEMU");
        assert_eq!(cause(Some(9), Some("vm stop --force"), ""), "'vm stop --force' ended it");
        assert_eq!(cause(Some(1 << 8), None, "no memory"), "QEMU failed");
        assert_eq!(cause(Some(0), None, "terminating on signal 15"), "a signal asked QEMU to quit");
        assert_eq!(cause(None, None, ""), "QEMU is gone, and no supervisor saw it exit");
    }

    #[test]
    fn only_the_latest_that_ended_are_on_record() {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..MOST + 20 {
            let found = Found {
                name: &format!("vm-{number}").parse().unwrap(),
                pid: None,
                status: Some(ExitStatus::from_raw(0)),
                moved: None,
                order: None,
                words: String::new(),
            };
            found.note(dir.path());
        }
        let all = ended(dir.path(), SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!((all.len(), all[0].name.as_str()), (MOST, "vm-20"));
        assert!(ended(dir.path(), SystemTime::now() + Duration::from_secs(60)).unwrap().is_empty());
    }
}
