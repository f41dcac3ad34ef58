//! `aquifer serve reprovision`.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::mem::{Discriminant, discriminant};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_control::group::reprovision::Why;
use aquifer_group::balance::{BalanceRound, Balanced, Balancing};
use aquifer_page::{Bytes, RegionName};
use clap::Args;
use serde::Serialize;
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGTERM};

use super::turns::Turns;
use crate::commands::Common;
use crate::commands::group::Groups;
use crate::failure::{OrFail, Result};
use crate::output;

/// Hand out the memory that sharing saves to the groups' VMs
///
/// The VMs' balloons move the memory. A VM of a group always gets its --min. Beyond that, up to its
/// --max, it gets part of what its group saves by sharing ('serve dedup'). The group's policy
/// decides how much. 'demand' gives VMs that swap a step each period, 'fair' gives all VMs the
/// same, and 'entitlement' gives in proportion to contribution. When writes unshare pages and
/// savings fall, VMs give memory back.
///
/// A group with '--allow-lending yes' lends unused savings to another such group whose VMs swap.
/// The borrower then pays for the scanner, and returns the memory as soon as its owner needs it.
///
/// Runs until ^C, and prints decisions with their reasons. VMs keep their memory afterwards; --undo
/// restores it. An agent does the same if its configuration sets groups.balance.
#[derive(Debug, Args)]
pub(super) struct Reprovision {
    #[command(flatten)]
    turns: Turns,
    /// Restore each VM's own memory and exit
    #[arg(long, conflicts_with_all = ["dry_run", "periods"])]
    undo: bool,
    #[command(flatten)]
    groups: Groups,
}

/// A VM that was told to return to its own memory size.
#[derive(Debug, Serialize)]
struct Told {
    vm: RegionName,
    size: Bytes,
}

impl Reprovision {
    pub(super) fn run(self, common: &Common) -> Result<()> {
        let what = || "balancing the memory of groups";
        let run_dir = std::path::absolute(&common.run_dir).or_fail(what)?;
        let mut balancing = Balancing::new(&run_dir, self.groups.all());
        if self.undo {
            let told = balancing.undo().or_fail(what)?;
            let told: Vec<_> = told.into_iter().map(|(vm, size)| Told { vm, size }).collect();
            return output::answer(common.json, &told, |told| {
                let line = |told: &Told| format!("{} gets {}", told.vm, told.size);
                told.iter().map(line).collect::<Vec<_>>().join("\n")
            });
        }
        let ended = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, ended.clone()).or_fail(what)?;
        }
        let mut said = BTreeMap::new();
        let mut left = self.turns.periods;
        let mut begun = false;
        while !ended.load(Ordering::Relaxed) && left != Some(0) {
            let next = Instant::now() + self.turns.period;
            match balancing.step(!self.turns.dry_run).or_fail(what) {
                Ok(turn) => say(common, &turn, &mut said).or_fail(what)?,
                // A failure of the first step ends the command. A later one is only reported: the
                // next step may read an agreement that was being written.
                Err(failure) if begun => failure.report(common.json),
                failed => drop(failed?),
            }
            begun = true;
            left = left.map(|left| left - 1);
            while Instant::now() < next && !ended.load(Ordering::Relaxed) && left != Some(0) {
                let pause = next.saturating_duration_since(Instant::now());
                thread::sleep(pause.min(Duration::from_millis(100)));
            }
        }
        Ok(())
    }
}

/// Prints the decisions that differ from those of the last step; with --json, the whole step.
fn say(
    common: &Common,
    turn: &BalanceRound,
    said: &mut BTreeMap<RegionName, (Bytes, Discriminant<Why>)>,
) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if common.json {
        serde_json::to_writer(&mut out, turn)?;
        writeln!(out)?;
        return out.flush();
    }
    for change in &turn.changes {
        writeln!(out, "{change}")?;
    }
    for Balanced { account, plan, failed, .. } in &turn.groups {
        let mut news = false;
        for decision in &plan.decisions {
            // Only size and kind of reason count; figures in the reason change at every step.
            let is = (decision.to, discriminant(&decision.why));
            if said.insert(decision.vm.clone(), is) != Some(is) {
                writeln!(out, "{decision}")?;
                news = true;
            }
        }
        if news {
            writeln!(out, "{account}; {}", plan.cache)?;
        }
        for failure in failed {
            writeln!(out, "{failure}")?;
        }
    }
    out.flush()
}
