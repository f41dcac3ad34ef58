//! `aquifer vm show-budget` and `aquifer vm set-budget`.

use std::path::Path;

use aquifer_page::Bytes;
use aquifer_vm::memory::{Account, Accounts, Budget};
use clap::{ArgGroup, Args};

use crate::commands::Common;
use crate::failure::{OrFail, Result};
use crate::output;
use crate::table::table;

/// Show the memory limit of all VMs together
///
/// Also shows what is free in the budget, and each VM's share.
#[derive(Debug, Args)]
pub struct ShowBudget {}

/// Set the memory limit of all VMs together
///
/// All VMs together get no more than the budget: boot memory, growth, and local caches of VMs in
/// the pool. By default it is all RAM of the host. Options that you omit keep their value.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("change").args(["memory", "section"]).required(true).multiple(true)))]
pub struct SetBudget {
    /// New limit
    #[arg(long, value_name = "SIZE")]
    memory: Option<Bytes>,
    /// Unit in which guests get and return memory
    ///
    /// Linux on x86-64 adds and removes 128MiB at a time, which is the default.
    #[arg(long, value_name = "SIZE")]
    section: Option<Bytes>,
}

impl ShowBudget {
    pub(super) fn run(self, common: &Common, run_dir: &Path) -> Result<()> {
        let what = || "reading the memory budget of VMs";
        let accounts = Budget::of(run_dir).accounts().or_fail(what)?;
        output::answer(common.json, &accounts, text)
    }
}

impl SetBudget {
    pub(super) fn run(self, common: &Common, run_dir: &Path) -> Result<()> {
        let what = || "setting the memory budget of VMs";
        let accounts = Budget::of(run_dir).set(self.memory, self.section).or_fail(what)?;
        output::answer(common.json, &accounts, text)
    }
}

fn text(accounts: &Accounts) -> String {
    let Accounts { section, local, pool, promised, vms } = accounts;
    let line =
        |of: &Account| format!("{} reserved = {} used + {} free", of.reserved, of.used, of.free);
    let mut lines = vec![format!("this host  {}", line(local))];
    if *promised > Bytes::ZERO {
        lines.push(format!(
            "           {promised} of the free memory is reserved for VMs that run out of memory"
        ));
    }
    lines.push(format!("the pool   {}", line(pool)));
    lines.push(format!("section    {section}"));
    if !vms.is_empty() {
        let rows = vms.iter().map(|(vm, share)| {
            let sizes = [share.memory(), share.local, share.reserve];
            let sizes = sizes.map(|size| size.to_string());
            [vec![vm.to_string()], sizes.to_vec()].concat()
        });
        lines.push(table(["VM", "MEMORY", "HERE", "RESERVE"], rows));
    }
    lines.join("\n")
}
