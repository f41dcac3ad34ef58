//! Reads of many runs.

use std::sync::{Arc, Mutex, PoisonError};

use aquifer_page::{Bytes, EXTENT_SIZE, PAGE_SIZE, WorkerId};
use aquifer_volume::Volume;
use aquifer_volume::holder::{FileHolder, Holder, HolderError, PieceMut};

use crate::common::*;

/// A lender that notes how many reads each request has in flight, and can fail such a request.
struct Noting {
    file: FileHolder,
    together: Arc<Mutex<Vec<usize>>>,
    fails: bool,
}

impl Holder for Noting {
    fn read(&self, worker: WorkerId, offset: u64, into: &mut [u8]) -> Result<(), HolderError> {
        self.file.read(worker, offset, into)
    }

    fn read_many(&self, worker: WorkerId, pieces: &mut [PieceMut<'_>]) -> Result<(), HolderError> {
        self.together.lock().unwrap_or_else(PoisonError::into_inner).push(pieces.len());
        if self.fails {
            return Err(HolderError::Failed("one of them".into()));
        }
        self.file.read_many(worker, pieces)
    }

    fn write(&self, worker: WorkerId, offset: u64, data: &[u8]) -> Result<(), HolderError> {
        self.file.write(worker, offset, data)
    }

    fn discard(&self, worker: WorkerId, offset: u64, length: u64) -> Result<(), HolderError> {
        self.file.discard(worker, offset, length)
    }

    fn flush(&self, worker: WorkerId) -> Result<(), HolderError> {
        self.file.flush(worker)
    }
}

/// Reads pages of three extents on two leases, and one that holds nothing. Returns how many reads
/// each lease had in flight.
fn together(fails: bool) -> Vec<usize> {
    let dir = tempfile::tempdir().unwrap();
    let other = lender(1);
    let volume = Volume::new(config(4)).unwrap();
    let noted = Arc::default();
    for (number, extents) in [(1, 2_u32), (2, 1)] {
        let bytes = Bytes(u64::from(extents) * EXTENT_SIZE);
        let file = FileHolder::create(dir.path(), bytes, 2).unwrap();
        let holder = Noting { file, together: Arc::clone(&noted), fails };
        let target = lease(&other, number, extents.into());
        volume.add_holder(target, Box::new(holder), extents, |_| true).unwrap();
        let first = if number == 1 { 0 } else { 2 };
        let all = first..first + u64::from(extents);
        all.for_each(|extent| write(&volume, extent * EXTENT_SIZE, 1));
    }
    assert!(volume.is_together(0, EXTENT_SIZE + 5));
    assert!(!volume.is_together(0, 2 * EXTENT_SIZE));
    assert!(!volume.is_together(3 * EXTENT_SIZE, 0), "the last extent is nowhere");
    let mut data = vec![7; 4 * PAGE_SIZE];
    let mut runs: Vec<_> =
        (0..4).map(|extent| extent * EXTENT_SIZE).zip(data.chunks_mut(PAGE_SIZE)).collect();
    volume.read_many(WorkerId(0), &mut runs).unwrap();
    for (at, data) in runs {
        let right = if at == 3 * EXTENT_SIZE { [0; PAGE_SIZE] } else { content(at, 1) };
        assert!(*data == right, "the page at {at}");
    }
    let noted = noted.lock().unwrap_or_else(PoisonError::into_inner);
    noted.clone()
}

#[test]
fn reads_of_several_extents_on_one_lease_are_in_flight_together() {
    assert_eq!(together(false), [2, 1]);
}

#[test]
fn reads_that_fail_together_succeed_one_by_one() {
    assert_eq!(together(true), [2, 1]);
}
