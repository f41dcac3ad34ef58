//! Second copies of leases' pages, on leases of other lenders.

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, EXTENT_SIZE, LeaseId, PAGES_PER_EXTENT};
use serde::{Deserialize, Serialize};

use crate::encryption::{Encryption, PageCipher};
use crate::error::VolumeError;
use crate::events::Happening;
use crate::holder::{
    Copy, Holder, HolderError, Lag, LagWriter, LaggingHolder, Second, fall_behind,
};
use crate::lease::Lease;
use crate::lock;
use crate::mover::{self, REST};
use crate::tags::Tags;
use crate::target::LeaseTarget;
use crate::volume::Volume;

/// How long a repair goes on before other upkeep has its turn.
const ROUND: Duration = Duration::from_secs(1);

/// The most that a volume has in rings of copies on leases.
const RINGS: Bytes = Bytes::mib(64);

/// The smallest ring. A copy for which less is left does not lag.
const SMALLEST_RING: Bytes = Bytes::mib(1);

/// A lease that holds a second copy of the pages of another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SecondCopy {
    /// The lease of which it is a copy.
    pub of: LeaseId,
    /// The lease that holds the copy.
    pub lease: LeaseTarget,
    /// Whether the copy lags behind: a write ends before this lease has the page.
    #[serde(default, skip_serializing_if = "is_false")]
    pub lags: bool,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// What a copy that lags behind needs.
struct Ring {
    writer: LagWriter,
    is_behind: Arc<AtomicBool>,
}

impl Volume {
    /// Begins a second copy of the pages of a lease, on another lease, which must hold as many
    /// extents. From now on each write goes to both. What the second copy lacks comes from the
    /// first, by [`Upkeep`](crate::Upkeep). Calls `record` before the copy is used.
    ///
    /// # Errors
    /// As [`add_lease`](Self::add_lease), and the error of `record`. Also if the first lease is
    /// unknown or has a second copy.
    pub fn add_copy<E: From<VolumeError>>(
        &self,
        copy: SecondCopy,
        record: impl FnOnce(&SecondCopy) -> Result<(), E>,
    ) -> Result<(), E> {
        let _adding = lock(&self.adding_lease);
        self.check_copy(&copy)?;
        let (lease, holder, _) = self.prepare(copy.lease)?;
        self.begin_new_copy(SecondCopy { lease, ..copy }, Box::new(holder), record)
    }

    /// Begins a second copy as [`add_copy`](Self::add_copy) does, on a holder that the caller made.
    ///
    /// # Errors
    /// As [`add_copy`](Self::add_copy).
    pub fn add_copy_holder<E: From<VolumeError>>(
        &self,
        copy: SecondCopy,
        holder: Box<dyn Holder>,
        record: impl FnOnce(&SecondCopy) -> Result<(), E>,
    ) -> Result<(), E> {
        let _adding = lock(&self.adding_lease);
        self.check_copy(&copy)?;
        self.begin_new_copy(copy, holder, record)
    }

    fn begin_new_copy<E: From<VolumeError>>(
        &self,
        mut copy: SecondCopy,
        holder: Box<dyn Holder>,
        record: impl FnOnce(&SecondCopy) -> Result<(), E>,
    ) -> Result<(), E> {
        // The same key, so that one encryption does for both copies.
        copy.lease.encryption = self.encryption_of(copy.of);
        self.forget_tags(copy.lease.lease);
        let ring = self.ring_of(&copy);
        let tags = self.copy_tags(&copy.lease, ring.is_some(), true)?;
        // Before the record: the next process must not take them for those of pages.
        tags.forget_all();
        record(&copy)?;
        self.begin_copy(copy, holder, tags, ring)?;
        Ok(())
    }

    /// Continues a second copy that an earlier process [began](Self::add_copy). Connections are
    /// made when they are needed, as by [`resume_lease`](Self::resume_lease).
    ///
    /// # Errors
    /// As [`resume_lease`](Self::resume_lease), or if the first lease is unknown or has a second
    /// copy.
    pub fn resume_copy(&self, copy: SecondCopy) -> Result<(), VolumeError> {
        let _adding = lock(&self.adding_lease);
        self.check_copy(&copy)?;
        let holder = self.unconnected(&copy.lease)?;
        self.resume_checked(copy, Box::new(holder))
    }

    /// Continues a second copy as [`resume_copy`](Self::resume_copy) does, on a holder that the
    /// caller made.
    ///
    /// # Errors
    /// As [`resume_copy`](Self::resume_copy).
    pub fn resume_copy_holder(
        &self,
        copy: SecondCopy,
        holder: Box<dyn Holder>,
    ) -> Result<(), VolumeError> {
        let _adding = lock(&self.adding_lease);
        self.check_copy(&copy)?;
        self.resume_checked(copy, holder)
    }

    fn resume_checked(&self, copy: SecondCopy, holder: Box<dyn Holder>) -> Result<(), VolumeError> {
        let ring = self.ring_of(&copy);
        let tags = self.copy_tags(&copy.lease, ring.is_some(), false)?;
        self.begin_copy(copy, holder, tags, ring)
    }

    /// Makes the ring of a copy that lags behind. Without one, the copy does not lag.
    fn ring_of(&self, copy: &SecondCopy) -> Option<Ring> {
        let leases: Vec<_> = self.leases.list().clone();
        let of_lender = |second: Arc<Second>| {
            second.lagging.as_ref().filter(|_| second.file.is_none()).map(LaggingHolder::ring_size)
        };
        let seconds = leases.iter().filter_map(|lease| lease.holder.second());
        let rings: Bytes = seconds.filter_map(of_lender).sum();
        // So the first copies have large rings, and later ones have some, too.
        let left = RINGS.saturating_sub(rings);
        let size = Bytes(copy.lease.capacity.0 / 16).min(Bytes(left.0 / 4));
        if !copy.lags || size < SMALLEST_RING {
            return None;
        }
        let is_behind = Arc::new(AtomicBool::new(true));
        let (events, target, flag) = (self.events.clone(), copy.lease.clone(), is_behind.clone());
        let tell = move |why: Option<&HolderError>| match why {
            Some(why) => fall_behind(&flag, &events, Some(&target), why),
            // For what the copy lacks.
            None => events.wake(),
        };
        let lag = Lag::of_lender(Box::new(tell));
        // Without the right to lock memory, each write waits for both lenders.
        let writer = LagWriter::start(size, lag).ok()?;
        Some(Ring { writer, is_behind })
    }

    /// Returns the tags of a second copy.
    fn copy_tags(
        &self,
        target: &LeaseTarget,
        lags: bool,
        may_be_new: bool,
    ) -> Result<Tags, VolumeError> {
        let fail = |source| VolumeError::Tags { lease: target.lease, source };
        match &self.config.ledger {
            Some(ledger) if lags => {
                let memory = ledger.tags(target.lease, pages_of(target), may_be_new);
                memory.map(Tags::lagging).map_err(fail)
            }
            _ => self.lease_tags(target, may_be_new),
        }
    }

    fn check_copy(&self, copy: &SecondCopy) -> Result<(), VolumeError> {
        let (of, target) = (copy.of, &copy.lease);
        let lease = self.leases.find(of).ok_or(VolumeError::UnknownLease(self.id(), of))?;
        let is_used = self.leases.find(target.lease).is_some()
            || lease.holder.second().is_some()
            || self.copies().iter().any(|other| other.lease.lease == target.lease);
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
        SecondCopy { of, lease: target, .. }: SecondCopy,
        holder: Box<dyn Holder>,
        tags: Tags,
        ring: Option<Ring>,
    ) -> Result<(), VolumeError> {
        let Some(lease) = self.leases.find(of) else {
            self.forget_tags(target.lease);
            return Err(VolumeError::UnknownLease(self.id(), of));
        };
        let shares_cipher = target.encryption == self.encryption_of(of);
        let key_of = if shares_cipher { of } else { target.lease };
        let encryption = target.encryption.as_ref();
        let cipher = encryption.map(|encryption| PageCipher::new(encryption, key_of));
        let (tags, of_volume) = (Arc::new(tags), (self.config.io_timeout, self.events.clone()));
        let second = |copy: Copy| Second::new(copy, shares_cipher, of_volume);
        self.begin_second(
            &lease,
            match ring {
                None => second(self.verified(Some(target), holder, cipher, tags)),
                Some(Ring { writer, is_behind }) => {
                    let of_sink = (pages_of(&target), self.mover_worker());
                    let lagging = writer.alone(holder, tags.clone(), of_sink);
                    let holder = Box::new(lagging.clone());
                    let copy = self.verified(Some(target), holder, cipher, tags);
                    Second { lagging: Some(lagging), is_behind, ..second(copy) }
                }
            },
        );
        Ok(())
    }

    /// Begins a second copy that lacks all pages.
    pub(crate) fn begin_second(&self, lease: &Lease, second: Second) {
        lease.holder.begin_second(Arc::new(second));
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
        // A copy that lags behind does it now. If it fails, its lender does not answer.
        _ = second.copy.holder.flush(self.mover_worker());
    }

    /// Returns the second copies on leases.
    pub fn copies(&self) -> Vec<SecondCopy> {
        let leases: Vec<_> = self.leases.list().clone();
        let copy = |lease: &Arc<Lease>| {
            let second = lease.holder.second()?;
            let (target, lags) = (second.copy.target.clone()?, second.lagging.is_some());
            Some(SecondCopy { of: lease.noted_as?, lease: target, lags })
        };
        leases.iter().filter_map(copy).collect()
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

/// Returns the number of pages in the whole extents of a lease.
fn pages_of(target: &LeaseTarget) -> u64 {
    target.capacity.0 / EXTENT_SIZE * PAGES_PER_EXTENT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_of_an_earlier_version_is_a_copy_that_does_not_lag() {
        let lease = concat!(
            r#"{"lease":"00000000000000000000000000000002","lender":"b","#,
            r#""address":"10.0.0.2:7001","export":"x","capacity":67108864,"secure":true}"#
        );
        let before = format!(r#"{{"of":"00000000000000000000000000000001","lease":{lease}}}"#);
        let copy: SecondCopy = serde_json::from_str(&before).unwrap();
        assert!(!copy.lags);
        assert_eq!(serde_json::to_string(&copy).unwrap(), before);
        let lagging = SecondCopy { lags: true, ..copy };
        let after = serde_json::to_string(&lagging).unwrap();
        assert_eq!(serde_json::from_str::<SecondCopy>(&after).unwrap(), lagging);
    }
}
