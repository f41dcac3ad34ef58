//! The limits of a VM's memory.

use aquifer_page::Bytes;
use aquifer_vm::memory::Limits;
use clap::Args;

/// The limits of a VM's memory, for every resize.
#[derive(Debug, Args)]
pub(super) struct Bounds {
    /// Minimum memory that a balancer leaves the VM
    ///
    /// 'vm start' and 'vm adopt' set 0 by default. In a group the VM always gets this much of
    /// --memory. The rest comes from the group's savings ('aquifer serve reprovision').
    #[arg(long, value_name = "SIZE")]
    min: Option<Bytes>,
    /// Maximum memory that any resize gives the VM
    ///
    /// By default the maximum size of the VM (--max-memory) is the only limit.
    #[arg(long, value_name = "SIZE")]
    max: Option<Bytes>,
    /// Weight of the VM when memory is scarce
    ///
    /// A VM gets memory in proportion to its weight among all VMs. 'vm start' and 'vm adopt' set 1
    /// by default.
    #[arg(long, value_name = "N")]
    weight: Option<u32>,
    /// Memory of this host to keep free for the VM
    ///
    /// The VM gets it at once when it runs out of memory. No other VM can use it. 'vm start' and
    /// 'vm adopt' set 0 by default. A VM with --cache SIZE can have none.
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

/// Describes limits for people.
pub(super) fn text(limits: &Limits) -> String {
    let Limits { min, max, weight, reserve } = limits;
    let max = if max.0 == u64::MAX { "its max-memory".to_owned() } else { max.to_string() };
    format!("at least {min}, at most {max}, weight {weight}, {reserve} kept free for it")
}
