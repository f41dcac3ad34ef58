//! A file that one process at a time has to itself.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// How long another process may have it: who does waits for nobody.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often it is looked whether that has it still.
const GLANCE: Duration = Duration::from_millis(2);

/// Locks the file at `path`, which is made if need be, for as long as what is returned lives.
///
/// # Errors
/// The system's; `TimedOut` where another process keeps it.
pub fn lock_file(path: &Path) -> io::Result<File> {
    let lock =
        OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path)?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => thread::sleep(GLANCE),
            Err(TryLockError::WouldBlock) => {
                let path = path.display();
                let why = format!(
                    "another process has held {path} for {PATIENCE:?}, perhaps one that is stopped: 'fuser {path}' names it"
                );
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
        }
    }
}
