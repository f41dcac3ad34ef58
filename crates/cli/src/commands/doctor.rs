//! `aquifer doctor`.

use std::process::ExitCode;

use clap::Args;

use super::Common;
use crate::doctor::{Report, Verdict};
use crate::failure::Result;
use crate::manual::Manual;
use crate::output::{self, Colour};

/// Tells what this host can do, and what is missing
///
/// Looks at the kernel, at memory and at the ways in which a volume can become a block device here, and gives each a
/// verdict: ok, warn (it works, less well or less safely than it could) or missing, with the reason and what to do. Changes
/// nothing.
#[derive(Debug, Args)]
pub struct Doctor {}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer doctor", "Look at this host"),
        (
            "aquifer doctor --json | jq '.checks[] | select(.verdict != \"ok\")'",
            "Only what is not as it should be",
        ),
    ],
    exit: &[("1", "also: something is missing that Aquifer cannot do its work without")],
    see_also: &["aquifer-attach(1)"],
    ..Manual::NONE
};

impl Doctor {
    /// Prints the report.
    ///
    /// # Errors
    /// If standard output cannot be written.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let report = Report::make();
        output::answer(common.json, &report, |report| text(report, output::colours()))?;
        Ok(if report.able { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// Returns a report as text, with a summary as the last line.
fn text(report: &Report, colours: bool) -> String {
    let verdict = match report.able {
        true => "This host can lend and borrow.",
        false => "This host cannot do Aquifer's work: something essential is missing.",
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
