//! Random operations of several threads, compared with plain memory, while leases come and go.

use std::collections::BTreeMap;
use std::thread;

use aquifer_page::{Bytes, EXTENT_SIZE, LeaseId, WorkerId};
use aquifer_volume::{LeaseTarget, Volume, VolumeConfig};

use crate::common::*;

const THREADS: usize = 4;
const EXTENTS: u64 = 5;
/// The unit that a thread has to itself; each extent has many of them, of all threads.
const BLOCK: u64 = 64 << 10;
const OPERATIONS: usize = 1500;

/// Blocks of one thread and their expected content.
struct Model {
    worker: WorkerId,
    random: Random,
    blocks: BTreeMap<u64, Vec<u8>>,
}

impl Model {
    fn new(worker: WorkerId) -> Self {
        Self { worker, random: Random(worker.0 as u64 * 977 + 12_345), blocks: BTreeMap::new() }
    }

    /// Picks a block of this thread, of a few in each extent, so that blocks repeat.
    fn pick(&mut self) -> u64 {
        let extent = self.random.below(EXTENTS);
        let place = self.random.below(6) * 170 + self.worker.0 as u64;
        extent * EXTENT_SIZE + place * BLOCK
    }

    /// Picks a range within a block: mostly whole pages, as in swap.
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
                part.iter_mut()
                    .enumerate()
                    .for_each(|(at, byte)| *byte = (seed >> (at % 5 * 8)) as u8);
                // In one piece, or in two that are in flight together.
                let cut = (seed % (end - start)) as usize;
                let (before, behind) = part.split_at(cut);
                let runs = [(base + start, before), (base + start + cut as u64, behind)];
                match seed % 3 {
                    0 => volume.write_many(self.worker, &runs).unwrap(),
                    _ => volume.write(self.worker, base + start, part).unwrap(),
                }
            }
            4..6 => {
                part.fill(0);
                volume.discard(self.worker, base + start, end - start).unwrap();
            }
            _ => {
                let mut data = vec![0xee; part.len()];
                let (before, behind) = data.split_at_mut(part.len() / 3);
                let middle = base + start + before.len() as u64;
                let mut runs = [(middle, behind), (base + start, before)];
                match self.random.below(3) {
                    0 => volume.read_many(self.worker, &mut runs).unwrap(),
                    _ => volume.read(self.worker, base + start, &mut data).unwrap(),
                }
                assert!(
                    data == *part,
                    "{start}..{end} of the block at {base:#x} differs from the written data"
                );
            }
        }
    }

    /// Reads all blocks, one by one and together.
    fn check(&self, volume: &Volume) {
        let mut all = vec![0xee; self.blocks.len() * BLOCK as usize];
        let mut runs: Vec<_> =
            self.blocks.keys().copied().zip(all.chunks_mut(BLOCK as usize)).collect();
        volume.read_many(self.worker, &mut runs).unwrap();
        for (data, (base, model)) in all.chunks(BLOCK as usize).zip(&self.blocks) {
            assert!(data == *model, "the block at {base:#x} differs when read with others");
        }
        for (base, model) in &self.blocks {
            let mut data = vec![0xee; BLOCK as usize];
            volume.read(self.worker, *base, &mut data).unwrap();
            assert!(data == *model, "the block at {base:#x} differs from the written data");
        }
    }
}

/// A lender: nbdkit or Aquifer's own.
trait LeaseSource {
    fn lease(&self, number: u128, extents: u64) -> LeaseTarget;
}

impl LeaseSource for Nbdkit {
    fn lease(&self, number: u128, extents: u64) -> LeaseTarget {
        lease(self, number, extents)
    }
}

impl LeaseSource for OurLender {
    fn lease(&self, number: u128, _extents: u64) -> LeaseTarget {
        self.lease(number)
    }
}

/// Runs threads on a volume while its leases are evacuated and come back in turn, and then checks
/// all blocks.
fn work_while_leases_come_and_go(lenders: &[(impl LeaseSource, u64)]) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let volume =
        Volume::new(VolumeConfig { spill: Some(dir.path().to_owned()), ..config(EXTENTS) })
            .unwrap();
    let join = |at: usize| {
        let (lender, extents) = &lenders[at];
        volume.add_lease(lender.lease(at as u128 + 1, *extents)).unwrap();
    };
    (0..lenders.len()).for_each(join);
    let work = |worker| {
        let mut model = Model::new(worker);
        (0..OPERATIONS).for_each(|_| model.step(&volume));
        model
    };
    let work = &work;
    let moved = thread::scope(|scope| {
        let workers: Vec<_> =
            (0..THREADS).map(WorkerId).map(|worker| scope.spawn(move || work(worker))).collect();
        let mut moved = 0;
        for turn in 0.. {
            let at = turn % lenders.len();
            let evacuated = volume.evacuate(LeaseId(at as u128 + 1), |_| ()).unwrap();
            moved += evacuated.to.iter().map(|moved| moved.extents).sum::<u64>();
            join(at);
            if workers.iter().all(thread::ScopedJoinHandle::is_finished) {
                break;
            }
        }
        workers.into_iter().for_each(|worker| worker.join().unwrap().check(&volume));
        moved
    });
    assert!(moved > 0, "nothing moved meanwhile");
    // In the end all room is given back.
    volume.discard(WorkerId(0), 0, EXTENTS * EXTENT_SIZE).unwrap();
    assert_eq!(placed(&volume), vec![0; lenders.len()]);
    assert_eq!(volume.status().errors, 0);
}

#[test]
fn over_lenders_of_another_make_a_volume_is_as_good_as_memory() {
    let lenders = [2, 2, 3].map(|extents| (lender(extents), extents));
    work_while_leases_come_and_go(&lenders);
    assert_eq!(lenders.iter().map(|(lender, _)| stored(lender)).sum::<u64>(), 0);
}

#[test]
fn over_lenders_of_ours_a_volume_is_as_good_as_memory() {
    let lenders = [2, 2, 3].map(|extents| (OurLender::start(extents), extents));
    work_while_leases_come_and_go(&lenders);
    assert!(lenders.iter().all(|(lender, _)| lender.ram() == Bytes::ZERO));
}

#[test]
fn over_nvme_and_nbd_together_a_volume_is_as_good_as_memory() {
    let kinds = [(Kind::Nvme, 2), (Kind::Nbd, 2), (Kind::Nvme, 3)];
    let lenders = kinds.map(|(kind, extents)| (OurLender::start_kind(kind, extents), extents));
    work_while_leases_come_and_go(&lenders);
    assert!(lenders.iter().all(|(lender, _)| lender.ram() == Bytes::ZERO));
}
