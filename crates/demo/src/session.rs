//! The session of a running demo, and its results.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use aquifer_cli::failure::{OrFail, Result};
use aquifer_cli::instance::Instance;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::program;
use super::wait::Wait;

/// The results of a demo.
#[derive(Debug)]
pub struct Outcome<Summary> {
    /// The figures.
    pub summary: Summary,
    /// The picture, as PNG.
    pub picture: Vec<u8>,
}

/// A running demo.
#[derive(Debug)]
pub(super) struct DemoSession {
    /// Set by a signal that asks the demo to end.
    pub(super) interrupted: Arc<AtomicBool>,
    /// The mark that tells the next demo whether this one still runs.
    pub(super) instance: Instance,
    /// The directory of its files.
    pub(super) dir: PathBuf,
}

impl DemoSession {
    /// Removes the remains of killed demos of this kind, and marks this demo as running.
    pub(super) fn begin(
        run_dir: &Path,
        kind: &str,
        clean_up: impl Fn(&Path, &Instance) -> Result<()>,
    ) -> Result<Self> {
        // A demo that would miss it later makes nothing.
        program::aquifer()?;
        let interrupted = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, interrupted.clone())
                .or_fail(|| "catching signals")?;
        }
        for dead in Instance::dead(run_dir, kind).or_fail(|| "looking for killed demos")? {
            clean_up(&run_dir.join(dead.name()), &dead)?;
        }
        let instance = Instance::claim(run_dir, kind).or_fail(|| "marking this demo as running")?;
        let dir = run_dir.join(instance.name());
        Ok(Self { interrupted, instance, dir })
    }

    pub(super) fn wait(&self) -> Wait<'_> {
        Wait(&self.interrupted)
    }
}
