//! Whether the kernel lets this process lock pages in RAM.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the kernel refuses to lock stored pages in RAM.
#[derive(Debug)]
pub(crate) struct RamLock {
    dir: PathBuf,
    refused: AtomicBool,
}

impl RamLock {
    /// Starts without a refusal.
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self { dir, refused: AtomicBool::new(false) }
    }

    /// Returns whether the kernel has refused.
    pub(crate) fn was_refused(&self) -> bool {
        self.refused.load(Ordering::Relaxed)
    }

    /// Notes the result of a lock operation; warns of the first refusal only.
    pub(crate) fn note(&self, locked: io::Result<()>) {
        if let Err(error) = locked
            && !self.refused.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                dir = %self.dir.display(),
                "cannot lock stored pages in RAM ({error}): the kernel may swap them out; \
                 raise RLIMIT_MEMLOCK (LimitMEMLOCK=infinity) or run as root"
            );
        }
    }
}
