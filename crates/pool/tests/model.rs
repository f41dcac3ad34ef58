//! Random operations of several threads, while leases come and go, against plain memory.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use aquifer_page::{EXTENT_SIZE, LeaseId};
use aquifer_pool::{Volume, VolumeConfig};
use common::*;

const THREADS: usize = 4;
const EXTENTS: u64 = 5;
/// What a thread has to itself; each extent has many of them, of all threads.
const BLOCK: u64 = 64 << 10;
const OPERATIONS: usize = 4000;

/// Blocks of one thread and what they should hold.
struct Model {
    worker: usize,
    random: Random,
    blocks: BTreeMap<u64, Vec<u8>>,
}

impl Model {
    fn new(worker: usize) -> Self {
        Self { worker, random: Random(worker as u64 * 977 + 12_345), blocks: BTreeMap::new() }
    }

    /// A block of this thread: a few in each extent, so that they are met again.
    fn pick(&mut self) -> u64 {
        let extent = self.random.below(EXTENTS);
        let place = self.random.below(6) * 170 + self.worker as u64;
        extent * EXTENT_SIZE + place * BLOCK
    }

    /// A range within a block: whole pages as a rule, as swap has it.
    fn range(&mut self) -> (u64, u64) {
        let (start, end) = (self.random.below(BLOCK), self.random.below(BLOCK));
        let (start, end) = (start.min(end), start.max(end) + 1);
        if self.random.below(4) == 0 {
            (start, end)
        } else {
            (start / PAGE * PAGE, end.next_multiple_of(PAGE))
        }
    }

    fn step(&mut self, volume: &Volume) {
        let base = self.pick();
        let (start, end) = self.range();
        let model = self.blocks.entry(base).or_insert_with(|| vec![0; BLOCK as usize]);
        let part = &mut model[start as usize..end as usize];
        match self.random.below(10) {
            0..4 => {
                let seed = self.random.next();
                part.iter_mut().enumerate().for_each(|(at, byte)| *byte = (seed >> (at % 5 * 8)) as u8);
                volume.write(self.worker, base + start, part).unwrap();
            }
            4..6 => {
                part.fill(0);
                volume.discard(self.worker, base + start, end - start).unwrap();
            }
            _ => {
                let mut data = vec![0xee; part.len()];
                volume.read(self.worker, base + start, &mut data).unwrap();
                assert!(data == *part, "{start}..{end} of the block at {base:#x} is not what was written");
            }
        }
    }

    fn check(&self, volume: &Volume) {
        for (base, model) in &self.blocks {
            let mut data = vec![0xee; BLOCK as usize];
            volume.read(self.worker, *base, &mut data).unwrap();
            assert!(data == *model, "the block at {base:#x} is not what was written");
        }
    }
}

#[test]
fn whatever_threads_do_while_leases_come_and_go_the_volume_is_as_good_as_memory() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let sizes = [2, 2, 3];
    let (volume, lenders) =
        volume(VolumeConfig { spill: Some(dir.path().to_owned()), ..config(EXTENTS) }, &sizes);
    let running = AtomicUsize::new(THREADS);
    let moves = thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS)
            .map(|worker| {
                let (volume, running) = (&volume, &running);
                scope.spawn(move || {
                    let mut model = Model::new(worker);
                    (0..OPERATIONS).for_each(|_| model.step(volume));
                    running.fetch_sub(1, Ordering::Relaxed);
                    model
                })
            })
            .collect();
        let mut moves = 0;
        let mut turn = 0;
        while running.load(Ordering::Relaxed) > 0
            && !workers.iter().all(thread::ScopedJoinHandle::is_finished)
        {
            let at = turn % sizes.len();
            turn += 1;
            let evacuated = volume.evacuate(LeaseId(at as u128 + 1), |_| ()).unwrap();
            moves += evacuated.to.iter().map(|moved| moved.extents).sum::<u64>();
            volume.add_lease(lease(&lenders[at], at as u128 + 1, sizes[at])).unwrap();
        }
        for worker in workers {
            worker.join().unwrap().check(&volume);
        }
        moves
    });
    assert!(moves > 0, "nothing moved meanwhile");
    // And in the end all room is given back.
    volume.discard(0, 0, EXTENTS * EXTENT_SIZE).unwrap();
    assert_eq!(placed(&volume), [0, 0, 0]);
    assert_eq!(lenders.iter().map(stored).sum::<u64>(), 0);
    assert_eq!(volume.status().errors, 0);
}
