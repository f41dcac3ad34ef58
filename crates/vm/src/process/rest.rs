//! What keeps a VM with a definition off, and what a look at the VM finds.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use aquifer_control::restart::{End, Seen};
use aquifer_region::process::record;
use serde::{Deserialize, Serialize};

use super::ended::{Cause, Ended};
use super::files::Files;
use super::message::Record;
use super::stop::WITHDRAWAL;
use crate::error::VmError;

/// When and why an agent starts a VM again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NextStart {
    /// The time, in milliseconds since the epoch.
    pub at_ms: u64,
    /// How the VM ended, or why its last start failed.
    pub why: String,
}

impl NextStart {
    /// Plans a start.
    pub fn new(at: SystemTime, why: &str) -> Self {
        let at = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { at_ms: at.as_millis() as u64, why: why.to_owned() }
    }

    /// Returns the time until the start; zero if it is due.
    pub fn wait(&self) -> Duration {
        let at = SystemTime::UNIX_EPOCH + Duration::from_millis(self.at_ms);
        at.duration_since(SystemTime::now()).unwrap_or_default()
    }
}

fn remove(path: &Path) -> Result<(), VmError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(VmError::io(format!("cannot remove {}", path.display()))),
    }
}

impl Files {
    fn next_start_record(&self) -> PathBuf {
        self.run_dir().join("vms").join(format!(".{}.next", self.name()))
    }

    /// Records when an agent starts the VM again. The next start, or a stop, removes that.
    ///
    /// # Errors
    /// [`VmError::Io`] if the record cannot be written.
    pub fn plan_start(&self, next: &NextStart) -> Result<(), VmError> {
        let path = self.next_start_record();
        let written = record::write(&path, next);
        written.map_err(VmError::io(format!("cannot write {}", path.display())))
    }

    /// Returns when an agent starts the VM again, if it is to do so.
    pub fn next_start(&self) -> Option<NextStart> {
        record::read(&self.next_start_record()).ok().flatten()
    }

    /// The mark is gone after a boot, as all of the run directory is.
    fn rest_mark(&self) -> PathBuf {
        self.run_dir().join("vms").join(format!(".{}.off", self.name()))
    }

    /// Records that the VM stays off until an operator starts it or the host boots. `why` is for
    /// readers of the file.
    ///
    /// # Errors
    /// [`VmError::Io`] if the mark cannot be written.
    pub fn rest(&self, why: &str) -> Result<(), VmError> {
        let mark = self.rest_mark();
        let write = || {
            mark.parent().map_or(Ok(()), fs::create_dir_all)?;
            fs::write(&mark, why)
        };
        write().map_err(VmError::io(format!("cannot write {}", mark.display())))?;
        remove(&self.next_start_record())
    }

    /// Returns why the VM is to stay off, if it is.
    pub fn why_at_rest(&self) -> Option<String> {
        fs::read_to_string(self.rest_mark()).ok()
    }

    /// Returns whether the VM is to stay off.
    pub fn is_at_rest(&self) -> bool {
        // If this user may not look, nothing may start the VM.
        self.rest_mark().try_exists().unwrap_or(true)
    }

    /// Records that the VM is to run.
    ///
    /// # Errors
    /// [`VmError::Io`] if the mark cannot be removed.
    pub fn end_rest(&self) -> Result<(), VmError> {
        remove(&self.next_start_record())?;
        remove(&self.rest_mark())
    }

    /// Returns whether the VM runs and belongs to this host, by the record that decides this.
    pub(crate) fn is_here(&self) -> bool {
        let is_here = |record: Record| record.incoming.is_none() && record.handed_over.is_none();
        self.read().is_ok_and(is_here) && self.is_running()
    }

    /// Finds out whether the VM runs. `ends` are the ends on record, oldest first.
    pub fn look(&self, ends: &[Ended]) -> Seen {
        if self.is_at_rest() {
            return Seen::Rests;
        }
        let record = match self.read() {
            Ok(record) => record,
            Err(VmError::Unknown(name)) => {
                let last = ends.iter().rfind(|ended| ended.name == name);
                return last.map_or(Seen::Never, |ended| Seen::Ended(end(&ended.cause)));
            }
            // A VM may run that this program cannot read about.
            Err(_) => return Seen::Busy,
        };
        if record.handed_over.is_some() {
            return Seen::Rests;
        }
        if record.incoming.is_some() {
            return Seen::Busy;
        }
        if self.is_running() {
            return Seen::Runs;
        }
        // The supervisor removes the record last, so the next look finds how the VM ended.
        if self.is_supervised() || !self.exists() {
            return Seen::Busy;
        }
        Seen::Ended(End::Failed)
    }

    /// Returns whether the VM has a record.
    fn exists(&self) -> bool {
        !matches!(self.read(), Err(VmError::Unknown(_)))
    }
}

fn end(cause: &Cause) -> End {
    match cause {
        Cause::Ordered { order } if order == WITHDRAWAL => End::Failed,
        // A VM that moved away and has no definition elsewhere was taken from this host.
        Cause::Ordered { .. } | Cause::Moved { .. } => End::Ordered,
        Cause::PoweredOff => End::PoweredOff,
        Cause::Terminated | Cause::Killed { .. } | Cause::Failed | Cause::Unseen => End::Failed,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::os::unix::net::UnixListener;

    use aquifer_page::{Bytes, HostName, MigrationId};

    use super::*;
    use crate::migrate::HandedOver;
    use crate::process::message::Origin;
    use crate::{Backing, VmSpec};

    fn record() -> Record {
        let spec =
            VmSpec::new("one".parse().unwrap(), Bytes::mib(64), Backing::Local { huge: None });
        Record::new(Origin::Started(Box::new(spec)))
    }

    fn ended(cause: Cause) -> Ended {
        let name = "one".parse().unwrap();
        Ended { name, at_ms: 1, cause, status: None, words: String::new() }
    }

    #[test]
    fn a_planned_start_is_forgotten_at_a_start_and_at_a_stop() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::new(dir.path(), &"one".parse().unwrap());
        fs::create_dir_all(dir.path().join("vms")).unwrap();
        let next = NextStart::new(SystemTime::now() + Duration::from_secs(3600), "it failed");
        for forget in [|files: &Files| files.rest("vm stop"), Files::end_rest] {
            assert_eq!(files.next_start(), None);
            files.plan_start(&next).unwrap();
            assert_eq!(files.next_start().as_ref(), Some(&next));
            assert!(next.wait() > Duration::from_secs(3000));
            forget(&files).unwrap();
        }
        assert_eq!(files.next_start(), None);
        assert_eq!(NextStart::new(SystemTime::UNIX_EPOCH, "").wait(), Duration::ZERO);
    }

    #[test]
    fn a_look_tells_a_vm_that_may_start_from_others() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::new(dir.path(), &"one".parse().unwrap());
        assert_eq!(files.look(&[]), Seen::Never);
        let killed = ended(Cause::Killed { signal: 9, out_of_memory: false });
        let ends = [ended(Cause::PoweredOff), killed];
        assert_eq!(files.look(&ends), Seen::Ended(End::Failed));
        assert_eq!(files.look(&ends[..1]), Seen::Ended(End::PoweredOff));
        files.rest("vm stop").unwrap();
        assert_eq!(files.look(&ends), Seen::Rests);
        assert_eq!(files.why_at_rest().as_deref(), Some("vm stop"));
        files.end_rest().unwrap();
        files.end_rest().unwrap();
        assert!(!files.is_at_rest());
        let ordered = |order: &str| ended(Cause::Ordered { order: order.to_owned() });
        assert_eq!(files.look(&[ordered("vm stop")]), Seen::Ended(End::Ordered));
        let withdrawn = [ordered(WITHDRAWAL)];
        assert_eq!(files.look(&withdrawn), Seen::Ended(End::Failed), "it is still wanted");

        files.create(&record()).unwrap();
        assert_eq!(files.look(&[]), Seen::Ended(End::Failed), "remains of a dead command");
        let lock = files.lock_supervision().unwrap();
        assert_eq!(files.look(&[]), Seen::Busy, "the supervisor starts QEMU");
        let qemu = UnixListener::bind(files.control()).unwrap();
        assert_eq!(files.look(&[]), Seen::Runs);
        drop(lock);
        assert_eq!(files.look(&[]), Seen::Runs, "without a supervisor");
        let to: HostName = "b".parse().unwrap();
        let migration = MigrationId::random();
        let handed_over = HandedOver { migration, to, left_at_source: None, defined: true };
        files.set_handed_over(Some(handed_over)).unwrap();
        assert_eq!(files.look(&[]), Seen::Rests, "another host owns it");
        files.set_handed_over(None).unwrap();
        assert!(files.is_here());
        drop(qemu);
        assert_eq!(files.look(&[]), Seen::Ended(End::Failed));
        assert!(!files.is_here());
        fs::write(dir.path().join("vms/one/record.json"), "{").unwrap();
        assert_eq!(files.look(&[]), Seen::Busy, "nobody knows");
    }
}
