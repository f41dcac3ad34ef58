//! `aquifer doctor`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use super::Common;
use super::serve::CONFIG;
use crate::doctor::{Report, Verdict};
use crate::failure::Result;
use crate::manual::Manual;
use crate::output::{self, Colour};

/// Check what this host supports and what is missing
///
/// Checks the kernel, memory and block device drivers. Each check has a verdict: 'ok', 'warn' (it
/// works, but slower or less safely) or 'missing', with the reason and a remedy. Also says when the
/// certificate of this host ends, and whether keys of its leases are too old. Changes nothing.
#[derive(Debug, Args)]
pub struct Doctor {
    /// Configuration file of this host's agent, if it has one
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    config: PathBuf,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer doctor", "Check this host"),
        (
            "aquifer doctor --json | jq '.checks[] | select(.verdict != \"ok\")'",
            "Print only warnings and missing features",
        ),
    ],
    exit: &[("1", "also: an essential feature is missing")],
    see_also: &["aquifer-volume-attach(1)"],
    ..Manual::NONE
};

impl Doctor {
    /// Prints the report.
    ///
    /// # Errors
    /// If standard output cannot be written.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let report = Report::make(&self.config);
        output::answer(common.json, &report, |report| text(report, output::colours()))?;
        Ok(if report.able { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// Returns a report as text, with a summary as the last line.
fn text(report: &Report, colours: bool) -> String {
    let verdict = match report.able {
        true => "This host can lend and borrow.",
        false => "This host cannot lend or borrow: an essential feature is missing.",
    };
    format!("{}\n{verdict}", listed(report, colours))
}

/// Returns the checks of a report, one a line.
pub(super) fn listed(report: &Report, colours: bool) -> String {
    let width = report.checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let mut lines = Vec::new();
    for check in &report.checks {
        let (word, colour) = match check.verdict {
            Verdict::Ok => ("ok", Colour::Green),
            Verdict::Warn => ("warn", Colour::Yellow),
            Verdict::Missing => ("missing", Colour::Red),
        };
        let verdict = colour.paint(&format!("{word:7}"), colours);
        lines.push(format!("{verdict}  {:width$}  {}", check.name, check.found));
        lines
            .extend(check.help.iter().map(|help| format!("{:7}  {:width$}  help: {help}", "", "")));
    }
    lines.join("\n")
}
