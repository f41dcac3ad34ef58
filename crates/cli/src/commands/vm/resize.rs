//! `aquifer vm resize`.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use aquifer_api::order::{Claim, ClaimPurpose};
use aquifer_page::{Bytes, RegionName};
use aquifer_vm::memory::{Direction, Order, Resized, Short, Spread, Times};
use aquifer_vm::process::{Files, client};
use clap::Args;
use serde::Serialize;

use crate::agent_call::Socket;
use crate::claim::Overcommit;
use crate::commands::Common;
use crate::failure::{Failure, OrFail, Result};
use crate::output;
use crate::progress::Progress;
use crate::table::table;

/// Grow or shrink a VM's memory while it runs
///
/// Needs 'vm start --max-memory', or an adopted VM with a virtio-mem device. The least memory is
/// that at boot. 'aquifer region resize' resizes the cache of a VM.
///
/// Sizes are rounded up to whole sections ('aquifer vm set-budget'), within the VM's limits. The
/// command returns when the guest has the memory, or has given it up and this host has it back.
///
/// A guest gives up only memory that it can free. If it cannot free enough, it keeps the rest; the
/// command prints the size reached and exits with 1.
#[derive(Debug, Args)]
pub struct Resize {
    /// Name of the VM
    name: RegionName,
    /// New size of the VM's memory
    #[arg(long, value_name = "SIZE")]
    memory: Bytes,
    /// Fail instead of rounding the size of --memory
    #[arg(long)]
    exact: bool,
    #[command(flatten)]
    overcommit: Overcommit,
    /// How long to retry if the guest stops short; 0s: not at all
    #[arg(long, value_name = "TIME", default_value = "10s",
        value_parser = humantime::parse_duration)]
    retry: Duration,
    /// Wait for and print the stages in the guest's kernel
    ///
    /// 'aquifer vm show' prints the stages of all resizes.
    #[arg(long)]
    stages: bool,
}

#[derive(Debug, Serialize)]
struct Answer {
    vm: RegionName,
    #[serde(flatten)]
    resized: Resized,
}

impl Resize {
    pub(super) fn name(&self) -> &RegionName {
        &self.name
    }

    /// Returns the claim for the new size. The agent counts it if it counts the VM: one with a
    /// cache of a fixed size takes no RAM of this host beyond that.
    fn claim(&self) -> Claim {
        Claim::new(self.name.clone(), ClaimPurpose::Vm, self.memory)
    }

    pub(super) fn run(self, common: &Common, files: &Files) -> Result<ExitCode> {
        let what = || format!("resizing VM '{}'", self.name);
        let progress = Progress::spinner(what());
        let order = Order {
            size: self.memory,
            from: None,
            exact: self.exact,
            retry: self.retry,
            urgent: false,
            stages: self.stages,
        };
        let socket = Socket::of_environment();
        let claimed = self.overcommit.claim(common, &socket, &what(), self.claim())?;
        let exe = std::env::current_exe().or_fail(what)?;
        let tell = |size: Bytes| progress.say(format!("{}: it has {size} now", what()));
        let resized = client::resize(&exe, files, &order, tell);
        let resized = resized.map_err(|error| Failure::new(what(), error))?;
        drop(progress);
        let is_short = resized.why.is_some();
        if !is_short {
            claimed.keep();
        }
        let answer = Answer { vm: self.name, resized };
        output::answer(common.json, &answer, text)?;
        Ok(if is_short { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }
}

/// Times of the stages of a VM's resizes, in microseconds, by direction.
#[derive(Debug, Serialize)]
pub(super) struct Spreads {
    add: BTreeMap<String, Spread>,
    remove: BTreeMap<String, Spread>,
}

impl Spreads {
    pub(super) fn of(times: &Times) -> Self {
        Self { add: times.spreads(Direction::Add), remove: times.spreads(Direction::Remove) }
    }

    /// Returns a table for people; empty if the VM was never resized.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for (name, stages) in [("grown", &self.add), ("shrunk", &self.remove)] {
            let Some(Spread { count, .. }) = stages.get("total") else { continue };
            let row = |(stage, Spread { min_us, max_us, median_us, .. }): (&String, &Spread)| {
                let [min, max, median] =
                    [min_us, max_us, median_us].map(|us| format!("{:.1}", *us as f64 / 1e3));
                [stage.replace('_', " "), min, max, median]
            };
            let columns = [&format!("{name} {count} times"), "MIN ms", "MAX ms", "MEDIAN ms"];
            text += &format!("\n{}", table(columns, stages.iter().map(row)));
        }
        text
    }
}

fn text(Answer { vm, resized }: &Answer) -> String {
    let Resized { from, reached, to, missing, why, usable, total_ms, .. } = resized;
    let mut lines = vec![match why {
        None if from == reached => format!("{vm} has {reached} already"),
        None => format!("{vm} has {reached} now, {from} before: {total_ms:.0} ms"),
        Some(Short::NotOnline { .. }) => {
            format!("{vm} has {reached} now, {from} before, but cannot use all of it")
        }
        Some(_) => format!("{vm} has {reached} now, {from} before: {missing} short of {to}"),
    }];
    lines.extend(why.as_ref().map(ToString::to_string));
    if usable.is_none() && reached > from {
        lines.push(
            "the guest cannot report whether it can use the memory: \
             it runs no agent and no balloon driver"
                .to_owned(),
        );
    }
    lines.join("\n")
}
