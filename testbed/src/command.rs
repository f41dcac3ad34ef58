//! Other programs, run to their end.

use std::process::{Command, Output, Stdio};

use anyhow::{Context as _, Result, bail};

/// Runs a program that must succeed.
///
/// # Errors
/// If the program cannot start (the error names it), or fails (the error holds its standard error).
pub(crate) fn run(command: &mut Command) -> Result<()> {
    finish(command).map(|_| ())
}

/// Runs a program as [`run`] does; returns its standard output.
///
/// # Errors
/// As [`run`], and if the output is not UTF-8.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    Ok(String::from_utf8(bytes(command)?)?)
}

/// Runs a program as [`run`] does; returns its raw standard output.
///
/// # Errors
/// As [`run`].
pub(crate) fn bytes(command: &mut Command) -> Result<Vec<u8>> {
    Ok(finish(command.stdout(Stdio::piped()))?.stdout)
}

fn finish(command: &mut Command) -> Result<Output> {
    let name = command.get_program().to_string_lossy().into_owned();
    let started = command.stderr(Stdio::piped()).spawn();
    let ended = started.and_then(std::process::Child::wait_with_output);
    let ended = ended
        .with_context(|| format!("cannot run {name}: scripts/install-packages test installs it"))?;
    if !ended.status.success() {
        let said = String::from_utf8_lossy(&ended.stderr).trim().to_owned();
        bail!("{command:?} failed ({}): {said}", ended.status);
    }
    Ok(ended)
}
