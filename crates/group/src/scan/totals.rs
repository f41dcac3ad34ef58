//! What the members of a group do, by which a scanner's rate is set.

use aquifer_control::group::scan_rate::Activity;
use aquifer_page::Bytes;

use super::report::Sharing;
use crate::member::Members;

/// What they have done since they started.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Totals {
    /// CPU that their programs and engines have used, in seconds.
    cpu_seconds: f64,
    /// Fetched from lenders and written to them, and swapped by guests.
    swapped: Bytes,
    /// Saved by sharing.
    saved: Bytes,
    /// Regions.
    vms: u32,
}

impl Totals {
    /// Of a group, which shares so much, and of the one that pays for its scanner if that is another one.
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

    /// What was done since `before`, with `scanner` seconds of CPU of the scanner's own, of `cpu` seconds that there were.
    pub(super) fn since(&self, before: &Self, scanner: f64, cpu: f64) -> Activity {
        // One that is gone takes its share with it.
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
