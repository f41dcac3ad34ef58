//! `aquifer vm set`: the limits of a VM's memory.

use aquifer_vm::memory::Limits;
use aquifer_vm::process::{Files, client};
use aquifer_page::{Bytes, RegionName};
use clap::Args;

use crate::commands::Common;
use crate::failure::{OrFail, Result};
use crate::output;

/// What a VM's memory is kept within, by whoever resizes it.
#[derive(Debug, Args)]
pub(super) struct Bounds {
    /// The balancer leaves it at least so much. In a group: what it has of --memory in any case; the rest is what its group saves ('aquifer group balance')
    #[arg(long, value_name = "SIZE")]
    min: Option<Bytes>,
    /// It never gets more, whoever asks
    #[arg(long, value_name = "SIZE")]
    max: Option<Bytes>,
    /// Its part where memory is scarce, beside the weights of other VMs (1 unless told)
    #[arg(long, value_name = "N")]
    weight: Option<u32>,
    /// Memory of this host that is kept free for it: what it gets at once when it is out of memory
    #[arg(long, value_name = "SIZE")]
    reserve: Option<Bytes>,
}

impl Bounds {
    /// Returns the limits `before`, replaced where the command line gives a value.
    pub(super) fn over(&self, before: Limits) -> Limits {
        Limits {
            min: self.min.unwrap_or(before.min),
            max: self.max.unwrap_or(before.max),
            weight: self.weight.unwrap_or(before.weight),
            reserve: self.reserve.unwrap_or(before.reserve),
        }
    }
}

/// Changes what a VM's memory is kept within
///
/// What is not said stays as it is. The VM is not resized by this; a balancer does that, if one runs.
#[derive(Debug, Args)]
pub struct Set {
    /// The VM
    name: RegionName,
    #[command(flatten)]
    bounds: Bounds,
}

impl Set {
    pub(super) fn name(&self) -> &RegionName {
        &self.name
    }

    pub(super) fn run(self, common: &Common, files: &Files) -> Result<()> {
        let what = || format!("setting the limits of VM '{}'", self.name);
        let before = client::status(files).or_fail(what)?.limits;
        let limits = self.bounds.over(before);
        client::limit(files, &limits).or_fail(what)?;
        output::answer(common.json, &limits, |limits| format!("{}: {}", self.name, text(limits)))
    }
}

/// Describes limits for people.
pub(super) fn text(limits: &Limits) -> String {
    let Limits { min, max, weight, reserve } = limits;
    let max = if max.0 == u64::MAX { "what it can have".to_owned() } else { max.to_string() };
    format!(
        "at least {min}, at most {max}, weight {weight}, {reserve} kept for when it is out of memory"
    )
}
