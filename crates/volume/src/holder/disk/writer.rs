//! The thread that writes the ring to the files of disk copies.

use std::io;

use aquifer_page::{PAGE_SIZE, WorkerId};

use super::super::file::Page;
use super::super::{Holder as _, HolderError};
use super::PAGE;
use super::ring::{Key, Ring};

/// The most pages of one write: 2 MiB.
const BATCH: usize = 512;

/// Writes until the ring ends.
pub(super) fn run(ring: &Ring) {
    let mut round = Round {
        ring,
        keys: Vec::with_capacity(ring.capacity),
        holes: Vec::new(),
        staged: vec![Page([0; PAGE_SIZE]); BATCH].into(),
        versions: Vec::with_capacity(BATCH),
    };
    while ring.wait_for_work() {
        if round.run().is_ok() {
            ring.end_round();
        }
    }
}

/// One pass over the ring, and its buffers.
struct Round<'a> {
    ring: &'a Ring,
    keys: Vec<Key>,
    holes: Vec<u32>,
    staged: Box<[Page]>,
    versions: Vec<u64>,
}

impl Round<'_> {
    /// Writes all that is in the ring now. Ends at the first failure: the pages then stay there.
    fn run(&mut self) -> Result<(), ()> {
        let Self { ring, keys, holes, staged, versions } = self;
        ring.begin_round(keys, holes);
        keys.sort_unstable();
        let follows = |one: &Key, next: &Key| *next == (one.0, one.1 + 1);
        for run in keys.chunk_by(follows) {
            let mut rest = run;
            while !rest.is_empty() {
                let (now, later) = rest.split_at(rest.len().min(BATCH));
                let backing = ring.stage(now, staged, versions);
                let Some(backing) = backing else {
                    // This page was discarded, or its copy has ended.
                    rest = &rest[1..];
                    continue;
                };
                let at = now[0].1 * PAGE;
                let done = backing.file.write_pages(at, &staged[..versions.len()]);
                ring.wrote(now, versions, done)?;
                rest = if versions.len() == now.len() { later } else { &rest[versions.len()..] };
            }
        }
        for number in &*holes {
            let mut from = 0;
            while let Some((backing, pages)) = ring.next_hole(*number, from) {
                from = pages.end;
                let (at, length) = (pages.start * PAGE, (pages.end - pages.start) * PAGE);
                let done = backing.file.discard(WorkerId(0), at, length);
                ring.punched(*number, pages, done.map_err(reason))?;
            }
        }
        Ok(())
    }
}

fn reason(error: HolderError) -> io::Error {
    io::Error::other(error)
}
