//! `aquifer vm budget`.

use std::path::Path;

use aquifer_vm::memory::{Account, Accounts, Budget as Book, Share};
use aquifer_page::Bytes;
use clap::Args;

use crate::commands::Common;
use crate::failure::{OrFail, Result};
use crate::output;

/// Shows or changes what this host has set aside for its guests
///
/// Guests get no more than that together, whoever resizes them: what a VM has booted with, what it has grown by, and the local caches of those whose memory
/// is in the pool. All RAM of the host, unless told. What is reserved is always what is used and what is free.
#[derive(Debug, Args)]
pub struct Budget {
    /// What is set aside from now on
    size: Option<Bytes>,
    /// The unit in which guests get memory and give it back; 128MiB is what Linux adds and removes at a time on x86-64
    #[arg(long, value_name = "SIZE")]
    section: Option<Bytes>,
}

impl Budget {
    pub(super) fn run(self, common: &Common, run_dir: &Path) -> Result<()> {
        let what = || "keeping account of the memory of guests";
        let accounts = Book::of(run_dir).set(self.size, self.section).or_fail(what)?;
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
            "           {promised} of what is free is kept for VMs that are out of memory"
        ));
    }
    lines.push(format!("the pool   {}", line(pool)));
    lines.push(format!("section    {section}"));
    if !vms.is_empty() {
        let mut table = comfy_table::Table::new();
        table.load_style(comfy_table::presets::NOTHING);
        table.set_header(["VM", "MEMORY", "HERE", "IN THE POOL", "RESERVE"]);
        for (vm, share) in vms {
            let Share { local, pool, reserve, .. } = share;
            let sizes = [share.memory(), *local, *pool, *reserve].map(|size| size.to_string());
            table.add_row([vec![vm.to_string()], sizes.to_vec()].concat());
        }
        lines.push(table.to_string());
    }
    lines.join("\n")
}
