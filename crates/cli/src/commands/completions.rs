//! `aquifer completions`.

use std::process::ExitCode;

use clap::Args;
use clap_complete::Shell;
use clap_complete::env::Shells;

use crate::failure::{Failure, OrFail as _, Result};
use crate::manual::Manual;
use crate::output;

/// The variable by which a shell's script asks this program how a line can go on.
pub(super) const VARIABLE: &str = "AQUIFER_COMPLETE";

/// Print completions for a shell
///
/// The shell then completes commands, options, and the names of VMs, regions, groups, volumes,
/// peers and lenders of this host. Print them again after an upgrade.
#[derive(Debug, Args)]
pub struct Completions {
    /// Shell to complete in
    shell: Shell,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        (
            "aquifer completions bash > /etc/bash_completion.d/aquifer",
            "Install them for every user of bash",
        ),
        (
            "aquifer completions fish > ~/.config/fish/completions/aquifer.fish",
            "Install them for one user of fish",
        ),
    ],
    ..Manual::NONE
};

impl Completions {
    /// Prints the completions.
    ///
    /// # Errors
    /// If standard output cannot be written.
    pub fn run(self) -> Result<ExitCode> {
        let mut script = Vec::new();
        let what = || format!("printing completions for {}", self.shell);
        let shells = Shells::builtins();
        let shell = shells.completer(&self.shell.to_string());
        let shell = shell.ok_or_else(|| Failure::new(what(), "this shell is unknown"))?;
        shell
            .write_registration(VARIABLE, "aquifer", "aquifer", "aquifer", &mut script)
            .or_fail(what)?;
        output::line(String::from_utf8_lossy(&script))?;
        Ok(ExitCode::SUCCESS)
    }
}
