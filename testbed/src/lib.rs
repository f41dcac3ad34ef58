//! Linux hosts for tests: QEMU guests with Debian's stock kernels, on a virtual switch without
//! uplink.
//!
//! ```no_run
//! use aquifer_testbed::{Kernel, Shell as _, Spec, Testbed};
//!
//! # fn main() -> anyhow::Result<()> {
//! let old = Spec::new("a").kernel(Kernel::V6_1);
//! let hosts = Testbed::start([old, Spec::new("b").module("nbd")])?;
//! hosts["a"].sh("ping -c 1 b")?;
//! hosts["b"].pull_plug()?;
//! hosts["b"].boot()?;
//! # Ok(())
//! # }
//! ```
//!
//! Nothing outlives the process that starts the hosts, however it ends. Only kernels and facts
//! about this machine stay on disk. An error shows the end of its host's console; a panicking test
//! shows all consoles' ends.

mod accelerator;
mod command;
mod console;
mod guest;
mod host;
mod image;
mod kernel;
mod line;
mod process;
mod qemu;
mod shell;
mod spawner;
mod spec;
mod switch;
pub mod sys;
mod testbed;
mod tsc;
mod wait;
pub mod wire;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

pub use guest::Guest;
pub use host::Host;
pub use kernel::{Kernel, Prepared};
pub use process::{Output, Process};
pub use shell::{Shell, quoted};
pub use spec::{Parts, Spec};
pub use testbed::Testbed;
pub use wait::{wait_for, wait_until};

/// Returns the directory for kernels and facts about this machine.
fn cache_dir() -> Result<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/testbed");
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    dir.canonicalize().with_context(|| format!("cannot find {}", dir.display()))
}

/// Finds a program of this crate beside the running one or, from a test, one directory up.
fn program(name: &str) -> Result<PathBuf> {
    let here = std::env::current_exe().context("cannot find the running program")?;
    let found =
        here.ancestors().skip(1).take(2).map(|dir| dir.join(name)).find(|path| path.exists());
    found.with_context(|| format!("{name} is not built: cargo build -p aquifer-testbed --bins"))
}
