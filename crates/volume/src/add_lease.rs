//! The ways in which a lease becomes part of a volume.

use std::io;
use std::sync::Arc;

use aquifer_page::{Bytes, EXTENT_SIZE, LeaseId, PAGES_PER_EXTENT};

use crate::encryption::PageCipher;
use crate::error::VolumeError;
use crate::holder::{Copy, Holder, RemoteHolder, VerifiedHolder};
use crate::lease::Lease;
use crate::lock;
use crate::tags::Tags;
use crate::target::LeaseTarget;
use crate::volume::Volume;

impl Volume {
    /// Adds a lease to the volume. If a slot has leftovers, they are discarded when an extent is
    /// placed there.
    ///
    /// This makes all connections at once: one for each worker, and one for moves of extents.
    ///
    /// # Errors
    /// [`VolumeError::LeaseInUse`] if the volume has the lease. Otherwise when the lender cannot be
    /// reached or refuses the handshake, or when the export contradicts the lease.
    pub fn add_lease(&self, target: LeaseTarget) -> Result<(), VolumeError> {
        self.add_recorded_lease(target, |_| Ok(()))
    }

    /// Adds a lease as [`add_lease`](Self::add_lease) does. Calls `record` once the lease is known
    /// to be usable, and before an extent can be placed there. The recorded lease has the
    /// incarnation that its pages have now.
    ///
    /// # Errors
    /// As [`add_lease`](Self::add_lease), and the error of `record`. The volume is then unchanged.
    pub fn add_recorded_lease<E: From<VolumeError>>(
        &self,
        target: LeaseTarget,
        record: impl FnOnce(&LeaseTarget) -> Result<(), E>,
    ) -> Result<(), E> {
        let _adding = lock(&self.adding_lease);
        let (target, holder, clean) = self.prepare(target)?;
        self.forget_tags(target.lease);
        let tags = self.lease_tags(&target, true)?;
        record(&target)?;
        self.lay_over(target, Box::new(holder), tags, clean.len() as u32, |index| {
            clean[index as usize]
        });
        Ok(())
    }

    /// Connects to a new lease and checks it. Returns which of its slots are all zeroes.
    pub(crate) fn prepare(
        &self,
        mut target: LeaseTarget,
    ) -> Result<(LeaseTarget, RemoteHolder, Vec<bool>), VolumeError> {
        let is_copy = self.copies().iter().any(|copy| copy.lease.lease == target.lease);
        if is_copy || self.leases.find(target.lease).is_some() {
            return Err(VolumeError::LeaseInUse(self.id(), target.lease));
        }
        let unusable = |why: String| VolumeError::Unusable {
            lease: target.lease,
            lender: target.lender.to_string(),
            why,
        };
        let holder = self.connect(&target)?;
        let (size, read_only) = holder.facts().map_err(|error| unusable(error.to_string()))?;
        if read_only {
            return Err(unusable("its export is read-only".to_owned()));
        }
        if size < target.capacity {
            return Err(unusable(format!(
                "its export has {size}, but the lease says {}",
                target.capacity
            )));
        }
        let total = u32::try_from(target.capacity.0 / EXTENT_SIZE).unwrap_or(u32::MAX);
        if total == 0 {
            return Err(unusable(format!(
                "{} is less than one extent of {}",
                target.capacity,
                Bytes(EXTENT_SIZE)
            )));
        }
        let mut clean = Vec::with_capacity(total as usize);
        for index in 0..total {
            let offset = u64::from(index) * EXTENT_SIZE;
            clean.push(
                holder
                    .is_hole(offset, EXTENT_SIZE as u32)
                    .map_err(|error| unusable(error.to_string()))?,
            );
        }
        if let Some(claim) = &mut target.claim {
            claim.incarnation = claim.incarnation.or(holder.incarnation());
        }
        Ok((target, holder, clean))
    }

    /// Adds a lease that an earlier process had [added](Self::add_lease). The workers connect at
    /// their first operation, so the lender need not be up yet. Leftovers in slots without a
    /// [restored](Self::restore) extent are discarded when an extent is placed there.
    ///
    /// # Errors
    /// [`VolumeError::LeaseInUse`] if the volume has the lease. Otherwise when this host lacks the
    /// certificate or cannot read the secret that the connection needs.
    pub fn resume_lease(&self, target: LeaseTarget) -> Result<(), VolumeError> {
        let _adding = lock(&self.adding_lease);
        if self.leases.find(target.lease).is_some() {
            return Err(VolumeError::LeaseInUse(self.id(), target.lease));
        }
        let holder = self.unconnected(&target)?;
        let total = u32::try_from(target.capacity.0 / EXTENT_SIZE).unwrap_or(u32::MAX);
        let tags = self.lease_tags(&target, true)?;
        self.lay_over(target, Box::new(holder), tags, total, |_| false);
        Ok(())
    }

    pub(crate) fn unconnected(&self, target: &LeaseTarget) -> Result<RemoteHolder, VolumeError> {
        let (workers, io_timeout) = (self.all_workers(), self.config.io_timeout);
        Ok(RemoteHolder::unconnected(target.source(self.identity())?, workers, io_timeout))
    }

    /// Adds a holder that the caller made, for holders without an address. The holder has `total`
    /// extents and stands for this lease. `is_clean` tells which slots are known to be all zeroes.
    ///
    /// # Errors
    /// There is no memory for the tags of its pages.
    pub fn add_holder(
        &self,
        target: LeaseTarget,
        holder: Box<dyn Holder>,
        total: u32,
        is_clean: impl FnMut(u32) -> bool,
    ) -> Result<(), VolumeError> {
        let tags = self.lease_tags(&target, true)?;
        self.lay_over(target, holder, tags, total, is_clean);
        Ok(())
    }

    fn lay_over(
        &self,
        target: LeaseTarget,
        holder: Box<dyn Holder>,
        tags: Tags,
        total: u32,
        is_clean: impl FnMut(u32) -> bool,
    ) {
        let encryption = target.encryption.as_ref();
        let cipher = encryption.map(|encryption| PageCipher::new(encryption, target.lease));
        let copy = self.verified(Some(target), holder, cipher, tags);
        self.leases.list_mut().push(Arc::new(Lease::new(copy, total, is_clean)));
        if self.disk.get().is_some() {
            // The upkeep begins its copy on the disk.
            self.events.wake();
        }
    }

    /// Encrypts and verifies the holder's pages.
    pub(crate) fn verified(
        &self,
        target: Option<LeaseTarget>,
        holder: Box<dyn Holder>,
        cipher: Option<PageCipher>,
        tags: impl Into<Arc<Tags>>,
    ) -> Copy {
        let (tags, workers) = (tags.into(), self.all_workers());
        let holder = VerifiedHolder::new(holder, cipher, tags.clone(), workers);
        Copy::new(target, holder, tags)
    }

    pub(crate) fn lease_tags(
        &self,
        target: &LeaseTarget,
        may_be_new: bool,
    ) -> Result<Tags, VolumeError> {
        self.kept_tags(target.lease, target.capacity.0 / EXTENT_SIZE, may_be_new)
            .map_err(|source| VolumeError::Tags { lease: target.lease, source })
    }

    /// Returns the tags of a lease of so many extents: those of the earlier process, if it left
    /// some.
    pub(crate) fn kept_tags(
        &self,
        lease: LeaseId,
        extents: u64,
        may_be_new: bool,
    ) -> io::Result<Tags> {
        let pages = extents * PAGES_PER_EXTENT;
        match &self.config.ledger {
            None => Ok(Tags::new(pages)),
            Some(ledger) => ledger.tags(lease, pages, may_be_new).map(Tags::over),
        }
    }

    pub(crate) fn forget_tags(&self, lease: LeaseId) {
        self.config.ledger.iter().for_each(|ledger| ledger.forget_tags(lease));
    }

    fn connect(&self, target: &LeaseTarget) -> Result<RemoteHolder, VolumeError> {
        let source = target.source(self.identity())?;
        RemoteHolder::connect(source, self.all_workers(), self.config.io_timeout).map_err(
            |source| {
                let (lease, lender) = (target.lease, target.lender.to_string());
                VolumeError::Connect { lease, lender, source: Box::new(source) }
            },
        )
    }
}
