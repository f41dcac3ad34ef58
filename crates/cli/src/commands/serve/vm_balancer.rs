//! `aquifer serve vm-balancer`.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::mem::{Discriminant, discriminant};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use aquifer_control::balance::{Config, SizeDecision, Why};
use aquifer_page::{Bytes, RegionName};
use aquifer_vm::memory::{BalancerStep, Balancing, Moved, Resized};
use clap::Args;
use serde::Serialize;
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGTERM};

use super::turns::Turns;
use crate::commands::Common;
use crate::failure::{OrFail, Result};

/// Move memory to the VMs that need it
///
/// Each period it checks every guest's use, swapping and pressure, and the requests of its
/// programs. A guest in need gets memory that is free in the budget ('aquifer vm set-budget'), else
/// the surplus of other VMs. If memory is short for all, weights divide it. Each VM stays within
/// its limits ('aquifer vm set'). VMs with a cache of a fixed size are left alone.
///
/// Runs until ^C, and prints decisions with their reasons. An agent does the same if its
/// configuration sets vms.balance.
#[derive(Debug, Args)]
pub(super) struct VmBalancer {
    #[command(flatten)]
    turns: Turns,
    /// Free memory to leave a guest, as a fraction of its use
    #[arg(long, value_name = "SHARE", default_value_t = Config::default().slack)]
    slack: f64,
    /// Minimum free memory to leave a guest
    #[arg(long, value_name = "SIZE", default_value_t = Config::default().least_slack)]
    least_slack: Bytes,
    /// Number of periods that a surplus must last before it moves
    #[arg(long, value_name = "N", default_value_t = Config::default().surplus_periods)]
    surplus_periods: u32,
    /// Take surplus memory back even if no VM needs it
    #[arg(long)]
    reclaim: bool,
}

/// One line of output with --json.
#[derive(Debug, Serialize)]
struct Line<'a> {
    decisions: &'a [SizeDecision],
    moves: &'a [aquifer_control::balance::Move],
    moved: Vec<Done<'a>>,
    /// VMs that do not answer, and the reasons.
    silent: &'a BTreeMap<RegionName, String>,
}

#[derive(Debug, Serialize)]
struct Done<'a> {
    vm: &'a RegionName,
    #[serde(flatten)]
    resized: Option<&'a Resized>,
    error: Option<String>,
}

impl VmBalancer {
    pub(super) fn run(self, common: &Common) -> Result<()> {
        let what = || "balancing the memory of VMs";
        let run_dir = std::path::absolute(&common.run_dir).or_fail(what)?;
        let config = Config {
            slack: self.slack,
            least_slack: self.least_slack,
            surplus_periods: self.surplus_periods,
            keep_surplus: !self.reclaim,
            ..Config::default()
        };
        let interrupted = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, interrupted.clone()).or_fail(what)?;
        }
        let exe = std::env::current_exe().or_fail(what)?;
        let mut balancing = Balancing::new(&run_dir, &exe, config).or_fail(what)?;
        let mut said = BTreeMap::new();
        let mut left = self.turns.periods;
        while !interrupted.load(Ordering::Relaxed) && left != Some(0) {
            let next = Instant::now() + self.turns.period;
            let mut turn = balancing.step(!self.turns.dry_run, None).or_fail(what)?;
            say(common, &turn, &mut said).or_fail(what)?;
            // A finished resize starts the next step at once, which hands freed memory on.
            while Instant::now() < next && !interrupted.load(Ordering::Relaxed) {
                let pause =
                    next.saturating_duration_since(Instant::now()).min(Duration::from_millis(100));
                if let Some(moved) = balancing.wait(pause) {
                    turn = balancing.step(!self.turns.dry_run, None).or_fail(what)?;
                    turn.moved.insert(0, moved);
                    say(common, &turn, &mut said).or_fail(what)?;
                }
            }
            left = left.map(|left| left - 1);
        }
        Ok(())
    }
}

/// Prints the decisions that differ from those of the last step; with --json, the whole step.
fn say(
    common: &Common,
    turn: &BalancerStep,
    said: &mut BTreeMap<RegionName, Discriminant<Why>>,
) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    let BalancerStep { plan, moved, silent, .. } = turn;
    if common.json {
        let done = |moved: &Moved| moved.end.as_ref().err().map(ToString::to_string);
        let moved = moved.iter().map(|is| Done {
            vm: &is.is.vm,
            resized: is.end.as_ref().ok(),
            error: done(is),
        });
        let line =
            Line { decisions: &plan.decisions, moves: &plan.moves, moved: moved.collect(), silent };
        serde_json::to_writer(&mut out, &line)?;
        return writeln!(out);
    }
    for Moved { is, end } in moved {
        match end {
            Ok(Resized { from, reached, total_ms, why, .. }) => {
                write!(out, "{}: {from} -> {reached} in {total_ms:.0} ms", is.vm)?;
                writeln!(out, "{}", why.as_ref().map_or(String::new(), |why| format!("; {why}")))?;
            }
            Err(error) => writeln!(out, "{}: {error}", is.vm)?,
        }
    }
    for decision in &plan.decisions {
        // Only the kind of reason counts; figures in the reason change at every step.
        let why = discriminant(&decision.why);
        if said.insert(decision.vm.clone(), why) != Some(why) {
            writeln!(out, "{decision}")?;
        }
    }
    out.flush()
}
