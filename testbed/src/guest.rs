//! A guest of a QEMU that another program started.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::console::Console;
use crate::line::Line;
use crate::process::Process;
use crate::shell::Shell;
use crate::wait::wait_for;

/// Timeout of a boot; only a hang takes so long.
const BOOT_TIMEOUT: Duration = Duration::from_secs(120);

/// A guest that booted from [`crate::Parts`] in a QEMU that another program started.
#[derive(Debug)]
pub struct Guest {
    console: Arc<Console>,
    line: Arc<Line>,
}

impl Guest {
    /// Connects to the guest and waits until it runs commands. `line` is the socket of
    /// [`crate::Parts::arguments`]; errors show the text from `console`, another socket. QEMU may
    /// have just started: the call waits until it listens.
    ///
    /// # Errors
    /// If a socket gets no listener, or the guest does not boot.
    pub fn connect(name: &str, line: &Path, console: &Path) -> Result<Self> {
        let connect = |path: &Path| {
            let what = format!("QEMU listens at {}", path.display());
            wait_for(&what, BOOT_TIMEOUT, || match UnixStream::connect(path) {
                Ok(stream) => Ok(Some(stream)),
                Err(error) if is_early(error.kind()) => Ok(None),
                Err(error) => Err(error).with_context(|| format!("at {}", path.display())),
            })
        };
        let screen = connect(console)?;
        let console = Console::new(name, false);
        console.show(screen);
        let line = Line::open(connect(line)?)?;
        if line.wait_until_ready(BOOT_TIMEOUT) {
            Ok(Self { console, line })
        } else {
            Err(console.failure("does not boot"))
        }
    }
}

/// Tells whether a connection fails like this before QEMU listens.
fn is_early(error: io::ErrorKind) -> bool {
    matches!(error, io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

impl Shell for Guest {
    fn spawn(&self, command: &str) -> Result<Process> {
        Ok(Process::start(&self.line, &self.console, command))
    }
}
