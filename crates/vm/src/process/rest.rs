//! What keeps a VM with a definition off, and what a look at the VM finds.

use std::fs;
use std::io;
use std::path::PathBuf;

use aquifer_control::restart::{End, Seen};

use super::ended::{Cause, Ended};
use super::files::Files;
use super::message::Record;
use crate::error::VmError;

impl Files {
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
        write().map_err(VmError::io(format!("cannot write {}", mark.display())))
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
        let mark = self.rest_mark();
        match fs::remove_file(&mark) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(VmError::io(format!("cannot remove {}", mark.display()))),
        }
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
        files.end_rest().unwrap();
        files.end_rest().unwrap();
        assert!(!files.is_at_rest());

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
