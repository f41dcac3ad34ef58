//! An export of memory.

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;
use serde_json::Value;

use crate::daemon::{Binary, EXPORT};
use crate::error::{Error, Result};
use crate::reports::Daemon;

/// A running export of memory that is ready; its drop kills it.
#[derive(Debug)]
pub struct Export {
    /// The process.
    pub daemon: Daemon,
    /// Its answer when it was ready.
    pub ready: Value,
}

impl Export {
    /// Returns the command of an export.
    pub fn command(aquifer: &Binary, run_dir: &Path) -> Command {
        aquifer.json(run_dir, EXPORT)
    }

    /// Starts an export by such a command, and waits until it is ready.
    ///
    /// # Errors
    /// If it cannot be started, or ends at once.
    pub fn start(command: &mut Command) -> Result<Self> {
        let what = |error: Error| Error::new("starting a lender", error.why);
        let mut daemon = Daemon::start(command).map_err(what)?;
        let ready = daemon.report().map_err(what)?;
        Ok(Self { daemon, ready })
    }

    /// Returns its first URI; empty if it has none.
    pub fn uri(&self) -> &str {
        self.ready["uri"].as_str().unwrap_or_default()
    }

    /// Returns the directory of its pages, unless its command names one.
    pub fn pages(&self) -> PathBuf {
        PathBuf::from(self.ready["dir"].as_str().unwrap_or_default())
    }

    /// Ends it by a signal; returns its exit code.
    ///
    /// # Errors
    /// As [`Daemon::end`].
    pub fn end(&mut self, signal: Signal) -> Result<Option<i32>> {
        self.daemon.end(signal).map(|status| status.code())
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        let _ = self.daemon.end(Signal::KILL);
        let _ = std::fs::remove_dir_all(self.pages());
    }
}
