//! The figures of the demo.

use std::fmt;

use aquifer_cli::table::table;
use aquifer_dedup::ScanReport;
use aquifer_group::balance::{BalanceRound, Balanced};
use aquifer_page::Bytes;
use serde::Serialize;

use super::mapped::Mapped;
use super::watch::found;

/// A guest of a group.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Vm {
    /// Its name.
    pub name: String,
    /// The memory that it has in any case, in bytes.
    pub base_bytes: Bytes,
    /// The memory that its balloon leaves it, in bytes.
    pub balloon_bytes: Bytes,
    /// The most that it has had since its balloon first shrank it to its base, in bytes.
    pub most_bytes: Bytes,
    /// Bytes that it contributes to the shared pages.
    pub contributed_bytes: Bytes,
    /// Bytes swapped so far, in and out.
    pub swapped_bytes: Bytes,
}

/// A group of guests.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Group {
    /// Its name.
    pub name: String,
    /// Its regions on this host: one for each guest.
    pub regions: u64,
    /// Bytes of those regions that are in frames of the group.
    pub shared_bytes: Bytes,
    /// `shared_bytes` minus the size of the frames.
    pub saved_bytes: Bytes,
    /// Bytes of the frames that its guests have mapped, from the kernel.
    pub mapped_bytes: Bytes,
    /// Pages that a write unshared (copy-on-write).
    pub broken: u64,
    /// The current scan rate, in pages per millisecond.
    pub scan_pages_per_ms: u32,
    /// Average CPU time of the scanner, in percent of one processor.
    pub scanner_cpu_pct: f64,
    /// The memory that the balloon of each guest leaves it, in bytes.
    pub balloon_bytes: Vec<Bytes>,
    /// The guests, in the same order.
    pub vms: Vec<Vm>,
}

impl Group {
    pub(super) fn new(
        group: &Balanced,
        turns: &[(f64, BalanceRound)],
        reports: &[ScanReport],
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

/// The course of the guest that needed more than its base.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Need {
    /// Its name.
    pub vm: String,
    /// Bytes that its process held.
    pub holds_bytes: Bytes,
    /// The memory that it has in any case, in bytes.
    pub base_bytes: Bytes,
    /// The memory that it had when it stopped swapping, in bytes.
    pub got_bytes: Bytes,
    /// The memory that it keeps after the other guest has written to the shared pages, in bytes.
    pub left_bytes: Bytes,
    /// Bytes swapped in its worst second, in and out.
    pub swapped_bytes_per_s: Bytes,
    /// Bytes swapped in the last second, when it had enough memory.
    pub swapped_bytes_per_s_after: Bytes,
    /// Seconds from its first growth until it had not swapped for three periods.
    pub seconds: f64,
}

/// The output of `aquifer demo groups --json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Memory of each guest at boot, in bytes.
    pub memory_bytes: Bytes,
    /// The part of it that is the guest's own, in bytes.
    pub base_bytes: Bytes,
    /// Bytes that all guests hold alike.
    pub image_bytes: Bytes,
    /// Both groups when the guest in need had enough.
    pub groups: Vec<Group>,
    /// Both groups after the other guest had written to all of the shared image.
    pub groups_after: Vec<Group>,
    /// The guest in need.
    pub need: Need,
    /// Pages of one group's frames that the kernel has mapped for guests of another.
    pub cross_group_merges: u64,
    /// Errors that the guests' kernels logged while they ran, plus MiB of their processes' memory
    /// with wrong content.
    pub guest_errors: u64,
    /// Seconds from the start of the demo to its last check.
    pub seconds: f64,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut groups, mut vms) = (Vec::new(), Vec::new());
        for (group, after) in self.groups.iter().zip(&self.groups_after) {
            groups.push([
                group.name.clone(),
                group.regions.to_string(),
                group.shared_bytes.to_string(),
                format!("{}, after the writes {}", group.saved_bytes, after.saved_bytes),
                format!("{} pages/ms", group.scan_pages_per_ms),
                format!("{:.1} %", group.scanner_cpu_pct),
            ]);
            for (vm, after) in group.vms.iter().zip(&after.vms) {
                vms.push([
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
        let groups = table(["GROUP", "REGIONS", "SHARED", "SAVED", "SCANNED", "CPU"], groups);
        let columns =
            ["VM", "BASE", "HAS", "GIVEN", "SWAPPED", "HAD AT MOST", "HAS AFTER THE WRITES"];
        writeln!(f, "{groups}\n\n{}\n", table(columns, vms))?;
        let Need { vm, base_bytes, got_bytes, left_bytes, seconds, .. } = &self.need;
        writeln!(
            f,
            "{vm} needed more than its {base_bytes}: it swapped up to {} a second, had \
             {got_bytes} after {seconds:.0} s, and swapped {} a second then; it kept \
             {left_bytes} after another guest of its group wrote to shared pages",
            self.need.swapped_bytes_per_s, self.need.swapped_bytes_per_s_after
        )?;
        writeln!(
            f,
            "pages shared across groups: {}; guest errors: {}; {:.0} s",
            self.cross_group_merges, self.guest_errors, self.seconds
        )
    }
}
