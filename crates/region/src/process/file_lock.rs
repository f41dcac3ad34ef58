//! A file lock that one process at a time holds.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// How long another process may hold the lock, as no holder waits for anything meanwhile.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The interval between attempts.
const GLANCE: Duration = Duration::from_millis(2);

/// Locks the file at `path`, and creates it if need be. The lock lasts while the returned file is
/// open.
///
/// # Errors
/// The system's; `TimedOut` if another process keeps the lock.
pub fn lock_file(path: &Path) -> io::Result<File> {
    let lock =
        OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path)?;
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => thread::sleep(GLANCE),
            Err(TryLockError::WouldBlock) => {
                let path = path.display();
                let why = format!(
                    "another process has held the lock {path} for {TIMEOUT:?}; it may be \
                     stopped; 'fuser {path}' names it"
                );
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
        }
    }
}
