//! Second copies of leases' pages, on leases of other lenders.

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, EXTENT_SIZE, LeaseId, PAGES_PER_EXTENT};

use crate::encryption::{Encryption, PageCipher};
use crate::error::VolumeError;
use crate::events::Happening;
use crate::holder::{Copy, DiskHolder, Holder, Second};
use crate::lease::Lease;
use crate::lock;
use crate::mover::{self, REST};
use crate::tags::Tags;
use crate::target::LeaseTarget;
use crate::volume::Volume;

/// How long a repair goes on before other upkeep has its turn.
const ROUND: Duration = Duration::from_secs(1);

impl Volume {
    /// Begins a second copy of the pages of the lease `of`, on the lease `target`, which must hold
    /// as many extents. From now on each write goes to both. What the second copy lacks comes from
    /// the first, by [`Upkeep`](crate::Upkeep). Calls `record` before the copy is used.
    ///
    /// # Errors
    /// As [`add_lease`](Self::add_lease), and the error of `record`. Also if the lease `of` is
    /// unknown or has a second copy.
    pub fn add_copy<E: From<VolumeError>>(
        &self,
        of: LeaseId,
        target: LeaseTarget,
        record: impl FnOnce(&LeaseTarget) -> Result<(), E>,
    ) -> Result<(), E> {
        let _adding = lock(&self.adding_lease);
        self.check_copy(of, &target)?;
        let (target, holder, _) = self.prepare(target)?;
        self.begin_new_copy(of, target, Box::new(holder), record)
    }

    /// Begins a second copy as [`add_copy`](Self::add_copy) does, on a holder that the caller made.
    ///
    /// # Errors
    /// As [`add_copy`](Self::add_copy).
    pub fn add_copy_holder<E: From<VolumeError>>(
        &self,
        of: LeaseId,
        target: LeaseTarget,
        holder: Box<dyn Holder>,
        record: impl FnOnce(&LeaseTarget) -> Result<(), E>,
    ) -> Result<(), E> {
        let _adding = lock(&self.adding_lease);
        self.check_copy(of, &target)?;
        self.begin_new_copy(of, target, holder, record)
    }

    fn begin_new_copy<E: From<VolumeError>>(
        &self,
        of: LeaseId,
        mut target: LeaseTarget,
        holder: Box<dyn Holder>,
        record: impl FnOnce(&LeaseTarget) -> Result<(), E>,
    ) -> Result<(), E> {
        // The same key, so that one encryption does for both copies.
        target.encryption = self.encryption_of(of);
        self.forget_tags(target.lease);
        let tags = self.lease_tags(&target, true)?;
        // Before the record: the next process must not take them for those of pages.
        tags.forget_all();
        record(&target)?;
        self.begin_copy(of, target, holder, tags)?;
        Ok(())
    }

    /// Continues a second copy that an earlier process [began](Self::add_copy). Connections are
    /// made when they are needed, as by [`resume_lease`](Self::resume_lease).
    ///
    /// # Errors
    /// As [`resume_lease`](Self::resume_lease), or if the lease `of` is unknown or has a second
    /// copy.
    pub fn resume_copy(&self, of: LeaseId, target: LeaseTarget) -> Result<(), VolumeError> {
        let _adding = lock(&self.adding_lease);
        self.check_copy(of, &target)?;
        let holder = self.unconnected(&target)?;
        let tags = self.lease_tags(&target, false)?;
        self.begin_copy(of, target, Box::new(holder), tags)
    }

    /// Continues a second copy as [`resume_copy`](Self::resume_copy) does, on a holder that the
    /// caller made.
    ///
    /// # Errors
    /// As [`resume_copy`](Self::resume_copy).
    pub fn resume_copy_holder(
        &self,
        of: LeaseId,
        target: LeaseTarget,
        holder: Box<dyn Holder>,
    ) -> Result<(), VolumeError> {
        let _adding = lock(&self.adding_lease);
        self.check_copy(of, &target)?;
        let tags = self.lease_tags(&target, false)?;
        self.begin_copy(of, target, holder, tags)
    }

    fn check_copy(&self, of: LeaseId, target: &LeaseTarget) -> Result<(), VolumeError> {
        let lease = self.leases.find(of).ok_or(VolumeError::UnknownLease(self.id(), of))?;
        let is_used = self.leases.find(target.lease).is_some()
            || lease.holder.second().is_some()
            || self.copies().iter().any(|(_, other)| other.lease == target.lease);
        if is_used {
            return Err(VolumeError::LeaseInUse(self.id(), target.lease));
        }
        if target.capacity.0 / EXTENT_SIZE < lease.total {
            return Err(VolumeError::Unusable {
                lease: target.lease,
                lender: target.lender.to_string(),
                why: format!("a copy of lease {of} needs {} extents", lease.total),
            });
        }
        Ok(())
    }

    fn encryption_of(&self, lease: LeaseId) -> Option<Encryption> {
        self.leases.find(lease)?.holder.first.target.as_ref()?.encryption.clone()
    }

    fn begin_copy(
        &self,
        of: LeaseId,
        target: LeaseTarget,
        holder: Box<dyn Holder>,
        tags: Tags,
    ) -> Result<(), VolumeError> {
        let Some(lease) = self.leases.find(of) else {
            self.forget_tags(target.lease);
            return Err(VolumeError::UnknownLease(self.id(), of));
        };
        let shares_cipher = target.encryption == self.encryption_of(of);
        let key_of = if shares_cipher { of } else { target.lease };
        let encryption = target.encryption.as_ref();
        let cipher = encryption.map(|encryption| PageCipher::new(encryption, key_of));
        let copy: Copy = self.verified(Some(target), holder, cipher, tags);
        self.begin_second(&lease, copy, None, shares_cipher);
        Ok(())
    }

    /// Begins a second copy that lacks all pages.
    pub(crate) fn begin_second(
        &self,
        lease: &Lease,
        copy: Copy,
        disk: Option<DiskHolder>,
        shares_cipher: bool,
    ) {
        lease.holder.begin_second(Arc::new(Second {
            copy,
            disk,
            shares_cipher,
            io_timeout: self.config.io_timeout,
            events: self.events.clone(),
            is_behind: AtomicBool::new(true),
            has_full: AtomicBool::new(false),
            late_reads: AtomicU64::new(0),
        }));
        self.events.wake();
    }

    /// Verifies some pages of each second copy and its first one. Returns whether there are some.
    /// [`Upkeep`](crate::Upkeep) does so, too.
    pub fn scrub_copies(&self) -> bool {
        let leases: Vec<_> = self.leases.list().clone();
        let copied: Vec<_> =
            leases.iter().filter(|lease| lease.holder.second().is_some()).collect();
        for lease in &copied {
            lease.forget_reads();
            lease.holder.scrub(self.mover_worker(), lease.total * PAGES_PER_EXTENT);
        }
        !copied.is_empty()
    }

    /// Ends the second copy on the lease `copy`, which may go back to its lender then. Does nothing
    /// if no lease has it.
    ///
    /// # Errors
    /// If only this copy has some page, or the lender of the first one does not answer.
    pub fn end_copy(&self, copy: LeaseId) -> Result<(), VolumeError> {
        let leases: Vec<_> = self.leases.list().clone();
        let is_it = |second: &Arc<Second>| {
            second.copy.target.as_ref().is_some_and(|target| target.lease == copy)
        };
        let second = |lease: &Arc<Lease>| {
            Some((lease.clone(), lease.holder.second().filter(|second| is_it(second))?))
        };
        let Some((lease, second)) = leases.iter().find_map(second) else { return Ok(()) };
        let pages = lease.total * PAGES_PER_EXTENT;
        if !lease.holder.end_second_if_whole(self.mover_worker(), pages) {
            return Err(VolumeError::OnlyCopy { copy, of: lease.noted_as.unwrap_or(copy) });
        }
        second.copy.holder.close();
        self.forget_tags(copy);
        Ok(())
    }

    /// Discards all second copies, and ends them. A copy that does not answer keeps its pages. The
    /// files of copies on the disk are removed.
    pub fn empty_copies(&self) {
        let leases: Vec<_> = self.leases.list().clone();
        for lease in &leases {
            let Some(second) = lease.holder.second() else { continue };
            // First, as nobody may read the zeroes there.
            lease.holder.end_second();
            if self.remove_disk_copy(&second) {
                continue;
            }
            self.discard_copy(&second, lease.total);
            second.copy.holder.close();
            let target = second.copy.target.as_ref();
            target.iter().for_each(|target| self.forget_tags(target.lease));
        }
    }

    /// Discards all that a second copy of so many extents holds, as far as its lender answers.
    pub(crate) fn discard_copy(&self, second: &Second, extents: u64) {
        for extent in 0..extents {
            let at = extent * EXTENT_SIZE;
            let done = second.copy.holder.discard(self.mover_worker(), at, EXTENT_SIZE);
            if done.is_err() && !second.copy.answers() {
                return;
            }
        }
    }

    /// Returns the second copies: the lease that each is of, and the lease that holds it.
    pub fn copies(&self) -> Vec<(LeaseId, LeaseTarget)> {
        let leases: Vec<_> = self.leases.list().clone();
        let copy = |second: Arc<Second>| second.copy.target.clone();
        leases
            .iter()
            .filter_map(|lease| Some((lease.noted_as?, lease.holder.second().and_then(copy)?)))
            .collect()
    }

    /// Returns a lease of which only the second copy has some page. `strictly` counts a page that
    /// is being written: while nothing else writes, that is a repair.
    pub fn relies_on_copy(&self, strictly: bool) -> Option<LeaseId> {
        let leases: Vec<_> = self.leases.list().clone();
        let relies = |lease: &&Arc<Lease>| lease.missing(strictly).0 > Bytes::ZERO;
        leases.iter().find(relies).and_then(|lease| lease.noted_as)
    }

    /// Copies what one of two copies lacks, if its lender answers: first what was read most lately.
    /// Returns whether all copies are whole. Stops after a while, or once `go_on` returns false.
    /// [`Upkeep`](crate::Upkeep) does so, too.
    pub fn repair_copies(&self, mut go_on: impl FnMut() -> bool) -> bool {
        let mut leases: Vec<_> = self.leases.list().clone();
        leases.sort_by_cached_key(|lease| Reverse(lease.reads()));
        let mut all_whole = true;
        let mut buffer = None;
        for lease in &leases {
            if !lease.holder.may_be_behind() {
                continue;
            }
            lease.holder.probe();
            let buffer = buffer.get_or_insert_with(mover::buffer);
            // The upkeep has other work, too.
            let until = Instant::now() + ROUND;
            let mut begun = Instant::now();
            let go_on = || {
                // Half of the time is for programs. Runs may be short, so it rests after some.
                if begun.elapsed() >= REST.0 {
                    thread::sleep(begun.elapsed().min(REST.1));
                    begun = Instant::now();
                }
                Instant::now() < until && go_on()
            };
            let order = lease.most_read_first().into_iter().map(Lease::pages_of);
            let whole = lease.holder.repair(self.mover_worker(), order, buffer, go_on);
            if matches!(whole, Ok(true)) {
                let of = lease.noted_as.into_iter();
                of.for_each(|lease| self.events.happened(Happening::CopiesWhole { lease }));
            } else {
                all_whole = false;
            }
        }
        all_whole
    }
}
