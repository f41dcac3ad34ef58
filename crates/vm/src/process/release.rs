//! The end of the supervision of an adopted VM.

use std::fs::File;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use super::client::{CLEARING, TIMEOUT, forget};
use super::files::Files;
use super::message::{Origin, Request};
use super::supervisor_call::answers;
use crate::error::VmError;

/// The time between two attempts to take a supervisor's place.
const PLACE_POLL: Duration = Duration::from_millis(10);

/// Forgets an adopted VM, which runs on unchanged.
///
/// # Errors
/// [`VmError::Misuse`] if the VM was started here; other variants if the supervisor does not
/// answer or does not end in time.
pub fn release(files: &Files) -> Result<(), VmError> {
    if !matches!(files.read()?.origin, Origin::Adopted { .. }) {
        let why =
            format!("Aquifer started this VM: stop it with 'aquifer vm stop {}'", files.name());
        return Err(VmError::Misuse(why));
    }
    // While this process has the supervisor's place, an agent starts no other supervisor.
    let _place = take_place(files)?;
    forget(files);
    Ok(())
}

/// Ends the supervisor of an adopted VM, and takes its place.
fn take_place(files: &Files) -> Result<File, VmError> {
    let fail = || VmError::io("cannot end the supervision");
    let deadline = Instant::now() + CLEARING;
    loop {
        match files.lock_supervision() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            place => return place.map_err(fail()),
        }
        // The supervisor exits without an answer. One that has just started does not listen yet.
        let asked = answers(files, &Request::Release, TIMEOUT).map(|mut next| drop(next()));
        if Instant::now() >= deadline {
            let name = files.name();
            let late = format!("the supervisor of VM '{name}' did not exit in {CLEARING:?}");
            return Err(asked.err().unwrap_or(VmError::Reported(late)));
        }
        thread::sleep(PLACE_POLL);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::fs;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::super::message::Record;
    use super::*;

    #[test]
    fn what_a_cut_off_removal_left_is_cleared() {
        let dir = tempfile::tempdir().unwrap();
        let origin = Origin::Adopted { qmp: PathBuf::from("/nowhere"), agent: None };
        let other = Files::new(dir.path(), &"web.gone".parse().unwrap());
        other.create(&Record::new(origin)).unwrap();
        let left = dir.path().join("vms/.guest.gone");
        fs::create_dir(&left).unwrap();
        fs::write(left.join("log"), "x").unwrap();
        Files::clear_removed(dir.path()).unwrap();
        assert!(!left.exists() && other.read().is_ok());
    }

    /// Adopts the VM `guest` and forgets it, again and again, while others begin to supervise it.
    #[test]
    fn no_supervisor_starts_while_a_vm_is_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::new(dir.path(), &"guest".parse().unwrap());
        let origin = Origin::Adopted { qmp: PathBuf::from("/nowhere"), agent: None };
        let vm = dir.path().join("vms/guest");
        let (is_over, began) = (AtomicBool::new(false), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        let Ok(lock) = files.lock_supervision() else { continue };
                        let has_record = files.read().is_ok();
                        thread::yield_now();
                        let is_kept = files.read().is_ok();
                        drop(lock);
                        assert!(!has_record || is_kept, "the VM went while it was supervised");
                        began.fetch_add(usize::from(has_record), Ordering::Relaxed);
                        // The command gets its turn.
                        thread::sleep(PLACE_POLL / 2);
                    }
                });
            }
            let mut rounds = 0;
            while rounds < 40 || began.load(Ordering::Relaxed) == 0 {
                rounds += 1;
                files.create(&Record::new(origin.clone())).unwrap();
                // So many files that others run while they go.
                (0..50).for_each(|it| drop(File::create(vm.join(it.to_string())).unwrap()));
                release(&files).unwrap();
                assert!(matches!(files.read(), Err(VmError::Unknown(_))));
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }
}
