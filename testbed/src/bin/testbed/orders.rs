//! Orders for running hosts, one line each.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context as _, Result};
use aquifer_testbed::{Shell as _, Testbed};

/// No command has a timeout in practice: its user can interrupt.
const NO_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

/// Carries out one line; a command's output goes to `out` and `err` as it comes. Returns the exit
/// code.
pub(crate) fn obey(
    hosts: &Testbed,
    line: &str,
    mut out: impl Write,
    err: impl Write,
) -> Result<i32> {
    let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
    let named = || hosts.host(rest.trim());
    match first {
        "cut" => named()?.cut(),
        "mend" => named()?.mend(),
        "unplug" => named()?.pull_plug()?,
        "boot" => named()?.boot()?,
        "console" => write!(out, "{}", named()?.console())?,
        _ => {
            let host = hosts
                .host(first)
                .context("an order is HOST COMMAND, cut, mend, unplug, boot or console HOST")?;
            let process = host.spawn(rest)?;
            process.end_input();
            return process.pass_on(NO_TIMEOUT, out, err);
        }
    }
    Ok(0)
}
