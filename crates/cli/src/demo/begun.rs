//! What every demo begins and ends with.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use kuva::backend::raster::RasterBackend;
use kuva::render::figure::Figure;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::wait::Wait;
use crate::failure::{Failure, OrFail, Result};
use crate::instance::Instance;

/// What is left of a demo.
#[derive(Debug)]
pub struct Outcome<Summary> {
    /// The figures.
    pub summary: Summary,
    /// The picture, as PNG.
    pub picture: Vec<u8>,
}

/// A demo that runs.
#[derive(Debug)]
pub(super) struct Begun {
    /// Whether there was a signal to end.
    pub(super) interrupted: Arc<AtomicBool>,
    /// Its mark.
    pub(super) instance: Instance,
    /// Where its files are.
    pub(super) dir: PathBuf,
}

impl Begun {
    /// Removes what demos of this kind left that were killed, each in its directory, and marks this one as running.
    pub(super) fn begin(
        run_dir: &Path,
        kind: &str,
        clean_up: impl Fn(&Path, &Instance) -> Result<()>,
    ) -> Result<Self> {
        let interrupted = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, interrupted.clone())
                .or_fail(|| "catching signals")?;
        }
        for dead in
            Instance::dead(run_dir, kind).or_fail(|| "looking for what killed demos left")?
        {
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

/// A figure as PNG.
pub(super) fn png(figure: Figure) -> Result<Vec<u8>> {
    RasterBackend::new()
        .render_scene(&figure.render())
        .map_err(|why| Failure::new("drawing the picture", why))
}
