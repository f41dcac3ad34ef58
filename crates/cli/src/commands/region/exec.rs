//! `aquifer region exec`.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::Args;

use crate::failure::{Failure, Result};

/// Runs a program that can map regions
///
/// The program itself is unmodified: libaquifer_shim.so is preloaded into it, and puts what it maps of a region under the care of
/// the region's engine.
#[derive(Debug, Args)]
pub struct Exec {
    /// The program and its arguments
    #[arg(trailing_var_arg = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

const SHIM: &str = "libaquifer_shim.so";

/// Where the shim is: beside this program, or in the lib directory beside its own.
///
/// # Errors
/// If it is in neither.
pub(crate) fn shim() -> Result<PathBuf> {
    let what = || format!("looking for {SHIM}");
    let exe = std::env::current_exe().map_err(|error| Failure::new(what(), error))?;
    let beside = exe.parent().unwrap_or(&exe);
    let places = [beside.join(SHIM), beside.join("../lib").join(SHIM)];
    places.iter().find(|path| path.exists()).cloned().ok_or_else(|| {
        let why = format!("it is neither {} nor {}", places[0].display(), places[1].display());
        Failure::new(what(), why).help("install it there: 'make install' does")
    })
}

/// `command` with the shim preloaded.
pub(crate) fn with_shim(command: &mut Command) -> Result<()> {
    let mut preload = shim()?.into_os_string();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    command.env("LD_PRELOAD", preload);
    Ok(())
}

impl Exec {
    pub(super) fn run(self) -> Result<ExitCode> {
        let (program, arguments) = self.command.split_first().expect("clap demands one");
        let mut command = Command::new(program);
        command.args(arguments);
        with_shim(&mut command)?;
        let error = command.exec();
        Err(Failure::new(format!("running {}", program.display()), error))
    }
}
