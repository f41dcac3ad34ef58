//! What is left of the demo: figures.

use std::fmt;

use aquifer_group::balance::{Balanced, Turn};
use aquifer_group::scan::Report;
use aquifer_page::Bytes;
use serde::Serialize;

use super::mapped::Mapped;
use super::watch::found;

/// A guest.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Vm {
    /// Its name.
    pub name: String,
    /// What is its own.
    pub base_bytes: Bytes,
    /// What its balloon leaves it.
    pub balloon_bytes: Bytes,
    /// The most that it has had since its balloon first left it its base.
    pub most_bytes: Bytes,
    /// What it contributes to what is shared.
    pub contributed_bytes: Bytes,
    /// Swapped so far, in and out.
    pub swapped_bytes: Bytes,
}

/// A group.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Group {
    /// Its name.
    pub name: String,
    /// Its regions here: the memory of its guests.
    pub regions: u64,
    /// Of that, what is kept in frames of the group.
    pub shared_bytes: Bytes,
    /// The difference between that and what the frames take.
    pub saved_bytes: Bytes,
    /// What its guests have mapped of those frames, as the kernel says.
    pub mapped_bytes: Bytes,
    /// Pages that were shared until somebody wrote to them.
    pub broken: u64,
    /// How fast its scanner looks at pages now.
    pub scan_pages_per_ms: u32,
    /// CPU of the scanner, of one processor, on average.
    pub scanner_cpu_pct: f64,
    /// What the balloon of each guest leaves it.
    pub balloon_bytes: Vec<Bytes>,
    /// The guests, in the same order.
    pub vms: Vec<Vm>,
}

impl Group {
    pub(super) fn new(
        group: &Balanced,
        turns: &[(f64, Turn)],
        reports: &[Report],
        mapped: Mapped,
    ) -> Self {
        let cpu: f64 = reports.iter().map(|report| report.scanner_cpu_pct).sum();
        let vm = |vm: &aquifer_group::balance::Vm| {
            let before = || turns.iter().filter_map(|(_, turn)| found(turn, vm.vm.as_str()));
            let in_its_base = before().skip_while(|vm| vm.size > vm.base);
            Vm {
                name: vm.vm.to_string(),
                base_bytes: vm.base,
                balloon_bytes: vm.size,
                most_bytes: in_its_base.map(|vm| vm.size).max().unwrap_or_default(),
                contributed_bytes: vm.contributed,
                swapped_bytes: before().map(|vm| vm.swapped).sum(),
            }
        };
        Self {
            name: group.account.group.to_string(),
            regions: group.sharing.regions,
            shared_bytes: group.sharing.shared_bytes,
            saved_bytes: group.sharing.saved_bytes,
            mapped_bytes: mapped.own,
            broken: group.sharing.broken,
            scan_pages_per_ms: reports.last().map_or(0, |report| report.scan_pages_per_ms.0),
            scanner_cpu_pct: cpu / reports.len().max(1) as f64,
            balloon_bytes: group.vms.iter().map(|vm| vm.size).collect(),
            vms: group.vms.iter().map(vm).collect(),
        }
    }
}

/// A guest that needed more than its base.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Need {
    /// Which.
    pub vm: String,
    /// What its process held.
    pub holds_bytes: Bytes,
    /// What is its own.
    pub base_bytes: Bytes,
    /// What it had when it swapped no more.
    pub got_bytes: Bytes,
    /// What it has since another guest of its group has written to what they shared.
    pub left_bytes: Bytes,
    /// What it swapped in its worst second, in and out.
    pub swapped_bytes_per_s: Bytes,
    /// And when it had what it needed, in use as before.
    pub swapped_bytes_per_s_after: Bytes,
    /// From when it needed more until it had not swapped for three seconds.
    pub seconds: f64,
}

/// What `aquifer demo groups --json` prints.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// What each guest boots with.
    pub memory_bytes: Bytes,
    /// What of that is its own.
    pub base_bytes: Bytes,
    /// What all guests hold alike.
    pub image_bytes: Bytes,
    /// Both groups when the guest in need had what it needed.
    pub groups: Vec<Group>,
    /// And when one of its group had written to all that they held alike.
    pub groups_after: Vec<Group>,
    /// The guest in need.
    pub need: Need,
    /// Pages of one group's frames that the kernel has mapped for guests of another.
    pub cross_group_merges: u64,
    /// Errors in the logs of the guests' kernels that came while they ran, and MiB of their processes' memory that were not what they must be.
    pub guest_errors: u64,
    /// From nothing to nothing.
    pub seconds: f64,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = |head: &[&str]| {
            let mut table = comfy_table::Table::new();
            table.load_style(comfy_table::presets::NOTHING);
            table.set_header(head);
            table
        };
        let mut groups = table(&["GROUP", "REGIONS", "SHARED", "SAVED", "SCANNED", "CPU"]);
        let mut vms = table(&[
            "VM",
            "BASE",
            "HAS",
            "GIVEN",
            "SWAPPED",
            "HAD AT MOST",
            "HAS AFTER THE WRITES",
        ]);
        for (group, after) in self.groups.iter().zip(&self.groups_after) {
            groups.add_row([
                group.name.clone(),
                group.regions.to_string(),
                group.shared_bytes.to_string(),
                format!("{}, after the writes {}", group.saved_bytes, after.saved_bytes),
                format!("{} pages/ms", group.scan_pages_per_ms),
                format!("{:.1} %", group.scanner_cpu_pct),
            ]);
            for (vm, after) in group.vms.iter().zip(&after.vms) {
                vms.add_row([
                    vm.name.clone(),
                    vm.base_bytes.to_string(),
                    vm.balloon_bytes.to_string(),
                    vm.balloon_bytes.saturating_sub(vm.base_bytes).to_string(),
                    vm.swapped_bytes.to_string(),
                    after.most_bytes.to_string(),
                    after.balloon_bytes.to_string(),
                ]);
            }
        }
        writeln!(f, "{groups}\n\n{vms}\n")?;
        let Need { vm, base_bytes, got_bytes, left_bytes, seconds, .. } = &self.need;
        writeln!(
            f,
            "{vm} needed more than its {base_bytes}: it swapped up to {} a second, had {got_bytes} after {seconds:.0} s, and swapped {} a second then; \
             {left_bytes} are left to it since another guest of its group has written to what they shared",
            self.need.swapped_bytes_per_s, self.need.swapped_bytes_per_s_after
        )?;
        writeln!(
            f,
            "pages shared across groups: {}; guest errors: {}; {:.0} s",
            self.cross_group_merges, self.guest_errors, self.seconds
        )
    }
}
