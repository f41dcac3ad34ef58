//! Simulated lenders that outlive every engine of a schedule. Some die, and come back with their
//! pages, with old ones, or with none.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aquifer_page::{LeaseId, PAGE_SIZE, WorkerId};
use aquifer_transport::initiator::{InitiatorError, Outcome};
use aquifer_volume::holder::{Holder, HolderError, Piece};

use crate::{effect, lock};

const PAGE: u64 = PAGE_SIZE as u64;

/// What is wrong with a lender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Away {
    /// It does not answer.
    Down,
    /// It came back without its pages, and the borrower knows by their incarnation.
    Lost,
}

/// Pages by lease and number.
type Stored = BTreeMap<(LeaseId, u64), Box<[u8]>>;

/// The pages of all leases, and the one host that may change them.
#[derive(Debug, Default)]
pub(super) struct Pages {
    pages: Mutex<Stored>,
    /// Backups of some leases' pages.
    backups: Mutex<BTreeMap<LeaseId, Stored>>,
    away: Mutex<BTreeMap<LeaseId, Away>>,
    owner: AtomicU64,
    trespassed: AtomicBool,
}

impl Pages {
    /// Makes this host the owner of the region.
    pub(super) fn give_to(&self, host: u64) {
        self.owner.store(host, Ordering::Relaxed);
    }

    /// Returns whether a host other than the owner changed a page.
    pub(super) fn was_trespassed(&self) -> bool {
        self.trespassed.load(Ordering::Relaxed)
    }

    /// Returns the number of pages on a lease.
    pub(super) fn count(&self, lease: LeaseId) -> usize {
        lock(&self.pages).range(all_of(lease)).count()
    }

    /// Returns what is wrong with a lease's lender.
    pub(super) fn away(&self, lease: LeaseId) -> Option<Away> {
        lock(&self.away).get(&lease).copied()
    }

    /// Kills the lender of a lease. It may come back with its pages.
    pub(super) fn kill(&self, lease: LeaseId) {
        lock(&self.away).insert(lease, Away::Down);
    }

    /// Kills the lender of a lease for good, with its pages.
    pub(super) fn lose(&self, lease: LeaseId) {
        lock(&self.pages).retain(|(of, _), _| *of != lease);
        lock(&self.away).insert(lease, Away::Lost);
    }

    /// Brings the lender of a lease back, unless it has lost the pages.
    pub(super) fn bring_back(&self, lease: LeaseId) {
        lock(&self.away).retain(|of, away| *of != lease || *away == Away::Lost);
    }

    /// Makes a lease of the same number a new one, perhaps with what the old one left.
    pub(super) fn renew(&self, lease: LeaseId) {
        lock(&self.away).remove(&lease);
    }

    /// Makes a backup of a lease's pages.
    pub(super) fn back_up(&self, lease: LeaseId) {
        let pages = lock(&self.pages);
        let kept = pages.range(all_of(lease)).map(|(at, page)| (*at, page.clone())).collect();
        lock(&self.backups).insert(lease, kept);
    }

    /// Restores the backup of a lease's pages; without a backup, none is left.
    pub(super) fn restore(&self, lease: LeaseId) {
        let old = lock(&self.backups).get(&lease).cloned().unwrap_or_default();
        let mut pages = lock(&self.pages);
        pages.retain(|(of, _), _| *of != lease);
        pages.extend(old);
    }
}

fn all_of(lease: LeaseId) -> std::ops::RangeInclusive<(LeaseId, u64)> {
    (lease, 0)..=(lease, u64::MAX)
}

/// A lease as one host reaches it.
#[derive(Debug)]
pub(super) struct CrashLender {
    pub(super) host: u64,
    pub(super) lease: LeaseId,
    pub(super) pages: Arc<Pages>,
    /// A second copy, which belongs to the host and not to the region.
    pub(super) is_copy: bool,
}

impl CrashLender {
    fn change(&self) {
        if !self.is_copy && self.pages.owner.load(Ordering::Relaxed) != self.host {
            self.pages.trespassed.store(true, Ordering::Relaxed);
        }
    }

    fn answer(&self) -> Result<(), HolderError> {
        let error = || Box::new(InitiatorError::new("lender", Outcome::Ended, "it is dead"));
        match self.pages.away(self.lease) {
            None => Ok(()),
            Some(Away::Down) => {
                Err(HolderError::Unreachable { waited: Duration::MAX, source: error() })
            }
            Some(Away::Lost) => Err(HolderError::Lost(error())),
        }
    }
}

impl Holder for CrashLender {
    fn read(&self, _worker: WorkerId, offset: u64, into: &mut [u8]) -> Result<(), HolderError> {
        self.answer()?;
        let pages = lock(&self.pages.pages);
        for (at, into) in into.chunks_exact_mut(PAGE_SIZE).enumerate() {
            match pages.get(&(self.lease, offset / PAGE + at as u64)) {
                Some(page) => into.copy_from_slice(page),
                None => into.fill(0),
            }
        }
        Ok(())
    }

    fn write(&self, _worker: WorkerId, offset: u64, data: &[u8]) -> Result<(), HolderError> {
        self.answer()?;
        for (at, data) in data.chunks_exact(PAGE_SIZE).enumerate() {
            effect::at("lender writes");
            self.change();
            let page = (self.lease, offset / PAGE + at as u64);
            lock(&self.pages.pages).insert(page, data.into());
        }
        Ok(())
    }

    /// The other copy may be written before, between or after the writes.
    fn write_while(
        &self,
        worker: WorkerId,
        pieces: &[Piece<'_>],
        _tags: &[u64],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), HolderError> {
        let first = pieces.first().map_or(0, |(offset, _)| offset / PAGE);
        let (before, after) = pieces.split_at(first as usize % (pieces.len() + 1));
        self.write_many(worker, before)?;
        meanwhile();
        self.write_many(worker, after)
    }

    fn discard(&self, _worker: WorkerId, offset: u64, length: u64) -> Result<(), HolderError> {
        self.answer()?;
        let range = (self.lease, offset / PAGE)..(self.lease, (offset + length) / PAGE);
        let some: Vec<_> = lock(&self.pages.pages).range(range).map(|(page, _)| *page).collect();
        for page in some {
            effect::at("lender discards");
            self.change();
            lock(&self.pages.pages).remove(&page);
        }
        Ok(())
    }

    fn flush(&self, _worker: WorkerId) -> Result<(), HolderError> {
        self.answer()
    }

    fn unreachable_for(&self) -> Option<Duration> {
        // Long enough that nobody waits for it any more.
        (self.pages.away(self.lease) == Some(Away::Down)).then_some(Duration::MAX)
    }

    fn is_lost(&self) -> bool {
        self.pages.away(self.lease) == Some(Away::Lost)
    }
}
