//! A guest of somebody else's QEMU.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::console::Console;
use crate::line::Line;
use crate::process::Process;
use crate::shell::Shell;

/// How long it may take to boot: for hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// A guest that has booted from [`crate::Parts`] in a QEMU that something else has started.
#[derive(Debug)]
pub struct Guest {
    console: Arc<Console>,
    line: Arc<Line>,
}

impl Guest {
    /// Waits until it runs commands, which come by the socket that [`crate::Parts::arguments`] were made for. What it says on its
    /// console, another socket, is shown when something fails.
    ///
    /// # Errors
    /// If nobody is at the sockets, or it does not boot.
    pub fn connect(name: &str, line: &Path, console: &Path) -> Result<Self> {
        let connect = |path: &Path| {
            UnixStream::connect(path).with_context(|| format!("nobody is at {}", path.display()))
        };
        let screen = connect(console)?;
        let console = Console::new(name, false);
        console.show(screen);
        let line = Line::open(connect(line)?)?;
        if line.wait_until_ready(PATIENCE) {
            Ok(Self { console, line })
        } else {
            Err(console.failure("does not boot"))
        }
    }
}

impl Shell for Guest {
    fn spawn(&self, command: &str) -> Result<Process> {
        Ok(Process::start(&self.line, &self.console, command))
    }
}
