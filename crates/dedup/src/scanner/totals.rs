//! The activity of a group's members, which determines a scanner's rate.

use aquifer_control::group::scan_rate::Activity;
use aquifer_page::Bytes;

use crate::{Members, Sharing};

/// Totals of the members since they started.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Totals {
    /// CPU time of their programs and engines, in seconds.
    cpu_seconds: f64,
    /// Bytes fetched from lenders, written back to them, and swapped by guests.
    swapped: Bytes,
    /// Memory that sharing saves.
    saved: Bytes,
    /// Number of regions.
    vms: u32,
}

impl Totals {
    /// Sums up a group, or the activity of the group that pays for its scanner.
    pub(super) fn of(members: &Members, sharing: &Sharing, payer: Option<&Members>) -> Self {
        let (vms, saved) = (members.all.len() as u32, sharing.saved_bytes);
        let mut totals = Self { vms, saved, ..Self::default() };
        for member in &payer.unwrap_or(members).all {
            let (cpu_seconds, swapped) = member.activity();
            totals.cpu_seconds += cpu_seconds;
            totals.swapped += swapped;
        }
        totals
    }

    /// Returns the activity since `before`. The scanner used `scanner` seconds of CPU time, and
    /// `cpu` seconds were available.
    pub(super) fn since(&self, before: &Self, scanner: f64, cpu: f64) -> Activity {
        // A vanished member takes its part of the total with it.
        let used = (self.cpu_seconds - before.cpu_seconds).max(0.0) + scanner;
        let signed = |bytes: Bytes| i64::try_from(bytes.0).unwrap_or(i64::MAX);
        Activity {
            cpu_percent: used / cpu * 100.0,
            swapped: Bytes(self.swapped.0.saturating_sub(before.swapped.0)),
            saved_bytes: signed(self.saved) - signed(before.saved),
            vms: self.vms,
        }
    }
}
