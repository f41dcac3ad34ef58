//! `aquifer completions`.

use std::io;
use std::process::ExitCode;

use clap::Args;
use clap_complete::Shell;

use crate::failure::Result;
use crate::manual::Manual;
use crate::output;

/// Print completions for a shell
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
        let mut script = io::Cursor::new(Vec::new());
        clap_complete::generate(self.shell, &mut super::command(), "aquifer", &mut script);
        output::line(String::from_utf8_lossy(&script.into_inner()))?;
        Ok(ExitCode::SUCCESS)
    }
}
