use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the kernel lets this process lock stored pages in RAM.
#[derive(Debug)]
pub(crate) struct RamLock {
    dir: PathBuf,
    refused: AtomicBool,
}

impl RamLock {
    /// As far as is known, it does.
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self { dir, refused: AtomicBool::new(false) }
    }

    /// Whether it has refused.
    pub(crate) fn was_refused(&self) -> bool {
        self.refused.load(Ordering::Relaxed)
    }

    /// Notes how locking something went; if it was refused, says so the first time.
    pub(crate) fn note(&self, locked: io::Result<()>) {
        if let Err(error) = locked
            && !self.refused.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                dir = %self.dir.display(),
                "stored pages may be swapped out, as they cannot be locked in RAM ({error}); \
                 raise RLIMIT_MEMLOCK (LimitMEMLOCK=infinity) or run as root"
            );
        }
    }
}
