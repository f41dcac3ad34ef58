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
/// Writes aquifer.1 and a page aquifer-COMMAND.1 for each command to a directory. Without a
/// directory it prints aquifer.1.
#[derive(Debug, Args)]
pub struct Man {
    /// Directory for the pages, created if missing
    dir: Option<PathBuf>,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer man /usr/local/share/man/man1", "Install the pages"),
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
            None => {
                output::line(String::from_utf8_lossy(&page(&super::command(), "aquifer", &[])?))?
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn write_all(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).or_fail(|| format!("creating {}", dir.display()))?;
    let mut cli = super::command();
    // clap copies global options to the subcommands only when the command is built.
    cli.build();
    write_with_parts(dir, &cli, &[])
}

/// Writes the page of a command, and those of its subcommands.
fn write_with_parts(dir: &Path, command: &clap::Command, words: &[&str]) -> Result<()> {
    let name = [&["aquifer"], words].concat().join("-");
    write(dir, &name, page(command, &name, words)?)?;
    command.get_subcommands().try_for_each(|part| {
        let words = [words, &[part.get_name()]].concat();
        write_with_parts(dir, part, &words)
    })
}

fn page(command: &clap::Command, name: &str, words: &[&str]) -> Result<Vec<u8>> {
    let mut page = Vec::new();
    super::manual(words)
        .page(command, name, &mut page)
        .or_fail(|| format!("writing the manual of {name}"))?;
    Ok(page)
}

fn write(dir: &Path, name: &str, page: Vec<u8>) -> Result<()> {
    let path = dir.join(format!("{name}.1"));
    fs::write(&path, page).or_fail(|| format!("writing {}", path.display()))
}
