//! The command `testbed parts`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::specs::Hardware;

/// Make the boot files of a host for another QEMU
///
/// Prints, one a line: the kernel, the initial file system (made in DIR), and the kernel's command
/// line.
///
/// Example: testbed parts --file target/release/examples/churn:/bin/churn DIR
#[derive(Debug, Args)]
pub(crate) struct Parts {
    #[command(flatten)]
    hardware: Hardware,
    /// Directory for the initial file system
    dir: PathBuf,
}

impl Parts {
    pub(crate) fn run(self) -> Result<ExitCode> {
        let parts = self.hardware.spec("host").parts(&self.dir)?;
        println!("{}\n{}\n{}", parts.kernel.display(), parts.initrd.display(), parts.append);
        Ok(ExitCode::SUCCESS)
    }
}
