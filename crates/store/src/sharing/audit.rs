//! The audit of the shared pages' counters against the tables, for tests.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use aquifer_page::lock;

use super::frames::GroupFrames;
use super::free::FIRST;
use super::groups::Groups;
use crate::lease::{Lease, Pages};
use crate::sys::{HOLE, LOST, LeasePages as _, Table};

impl Groups {
    /// Compares each group's counters with the tables of `leases`. No thread may write to these
    /// meanwhile.
    pub(crate) fn audit(&self, leases: &[Arc<Lease>]) -> Result<(), String> {
        for (group, members) in self.locked().iter() {
            let served = leases
                .iter()
                .filter(|lease| lease.group() == group)
                .filter_map(|lease| table_of(lease));
            members
                .frames
                .audit(served.chain(&members.left_alone))
                .map_err(|why| format!("group {group}: {why}"))?;
        }
        Ok(())
    }
}

fn table_of(lease: &Lease) -> Option<&Table> {
    match lease.pages() {
        Pages::Private(_) => None,
        Pages::Shared(shared) => Some(shared.table()),
    }
}

impl GroupFrames {
    fn audit<'a>(&self, tables: impl Iterator<Item = &'a Table>) -> Result<(), String> {
        let end = self.fresh.load(Ordering::Relaxed) as u32;
        let mut expected = vec![0; end as usize];
        for table in tables {
            let entries = table.read(0..table.pages());
            let frames = entries.pages().map(|page| entries.entry(page));
            frames
                .filter(|&frame| frame != HOLE && frame != LOST)
                .for_each(|frame| expected[frame as usize] += 1);
        }
        self.audit_references(&expected)?;
        self.audit_places(&expected)
    }

    /// Checks each frame's reference count and the group's totals.
    fn audit_references(&self, expected: &[u32]) -> Result<(), String> {
        for frame in FIRST as u32..expected.len() as u32 {
            let (counted, found) = (self.references(frame), expected[frame as usize]);
            same(&format!("references to frame {frame}"), counted.into(), found.into())?;
        }
        let with =
            |least: u32| expected.iter().filter(|&&references| references >= least).count() as u64;
        same(
            "references",
            self.counters.references.get(),
            expected.iter().copied().map(u64::from).sum(),
        )?;
        same("frames in use", self.counters.frames.get(), with(1))?;
        same("shared frames", self.counters.shared.get(), with(2))?;
        let taken = self.file.taken().map_err(|error| error.to_string())?;
        same("bytes of frames with RAM", self.usage().taken.0, taken)
    }

    /// Checks that each frame in use is once in the index, and each other frame once among the free
    /// ones.
    fn audit_places(&self, expected: &[u32]) -> Result<(), String> {
        let (mut used, mut free, mut warm) = (BTreeMap::new(), BTreeMap::new(), 0);
        for shard in &self.shards {
            lock(shard).visit(
                &self.file,
                |frame| *used.entry(frame).or_insert(0) += 1,
                |frame, has_ram| {
                    *free.entry(frame).or_insert(0) += 1;
                    warm += u64::from(has_ram);
                },
            );
        }
        for frame in FIRST as u32..expected.len() as u32 {
            let places = (used.remove(&frame), free.remove(&frame));
            let right =
                if expected[frame as usize] > 0 { (Some(1), None) } else { (None, Some(1)) };
            if places != right {
                return Err(format!(
                    "frame {frame} is indexed and free {places:?} times instead of {right:?}"
                ));
            }
        }
        same("frames that were never used", (used.len() + free.len()) as u64, 0)?;
        same("frames with RAM", self.counters.populated.get(), self.counters.frames.get() + warm)
    }
}

fn same(what: &str, counted: u64, found: u64) -> Result<(), String> {
    if counted == found { Ok(()) } else { Err(format!("{what}: {counted} counted, {found} found")) }
}
