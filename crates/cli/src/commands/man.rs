//! `aquifer man`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;

use crate::failure::{OrFail, Result};
use crate::manual::Manual;
use crate::output;

/// Write the manual as man pages
///
/// Writes aquifer.1 and a page aquifer-COMMAND.1 for each command to man1 in a directory, and
/// aquifer.toml.5, about the agent's configuration, to man5. Without a directory it prints
/// aquifer.1.
#[derive(Debug, Args)]
pub struct Man {
    /// Directory for man1 and man5, created if missing
    dir: Option<PathBuf>,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer man /usr/local/share/man", "Install the pages"),
        ("aquifer man | man -l -", "Read the first page"),
    ],
    see_also: &["man(1)"],
    ..Manual::NONE
};

impl Man {
    /// Writes the pages.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn run(self) -> Result<ExitCode> {
        match self.dir {
            Some(dir) => write_all(&dir)?,
            None => output::line(String::from_utf8_lossy(&page(&super::command(), &["aquifer"])?))?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn write_all(dir: &Path) -> Result<()> {
    let [commands, files] = ["man1", "man5"].map(|section| dir.join(section));
    for dir in [&commands, &files] {
        fs::create_dir_all(dir).or_fail(|| format!("creating {}", dir.display()))?;
    }
    let mut page = Vec::new();
    super::config_page::write(&mut page).or_fail(|| "writing the manual of aquifer.toml")?;
    write(&files.join("aquifer.toml.5"), &page)?;
    let mut cli = super::command();
    // clap copies global options to the subcommands only when the command is built.
    cli.build();
    write_with_parts(&commands, &cli, &["aquifer"])
}

/// Writes the page of a command, and those of its subcommands.
fn write_with_parts(dir: &Path, command: &clap::Command, words: &[&str]) -> Result<()> {
    write(&dir.join(format!("{}.1", words.join("-"))), &page(command, words)?)?;
    command.get_subcommands().try_for_each(|part| {
        let words = [words, &[part.get_name()]].concat();
        write_with_parts(dir, part, &words)
    })
}

fn page(command: &clap::Command, words: &[&str]) -> Result<Vec<u8>> {
    let mut page = Vec::new();
    super::manual(&words[1..])
        .page(command, words, &mut page)
        .or_fail(|| format!("writing the manual of '{}'", words.join(" ")))?;
    Ok(page)
}

fn write(path: &Path, page: &[u8]) -> Result<()> {
    fs::write(path, page).or_fail(|| format!("writing {}", path.display()))
}
