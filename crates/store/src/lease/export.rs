//! A lease as the servers of the protocols see it.

use aquifer_page::export::{self, Export, ExportError, Run, Segment};
use aquifer_page::visitor::{Denied, End, Stay, Visitor};
use aquifer_page::{Bytes, Incarnation, LeaseId};

use super::{Held, Lease};

impl Export for Lease {
    fn id(&self) -> LeaseId {
        Self::id(self)
    }

    fn incarnation(&self) -> Incarnation {
        Self::incarnation(self)
    }

    fn capacity(&self) -> Bytes {
        Self::capacity(self)
    }

    fn stored(&self) -> Bytes {
        Self::stored(self)
    }

    fn admit(&self, visitor: &Visitor, end: End) -> Result<Stay, Denied> {
        Ok(Box::new(Self::admit(self, visitor, end)?))
    }

    fn check(&self, offset: u64, length: u64) -> Result<(), ExportError> {
        Self::check(self, offset, length)
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), ExportError> {
        Self::read(self, offset, into)
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), ExportError> {
        Self::write(self, offset, from)
    }

    fn discard(&self, offset: u64, length: u64) -> Result<(), ExportError> {
        Self::discard(self, offset, length)
    }

    fn allocate_zeroes(&self, offset: u64, length: u64) -> Result<(), ExportError> {
        Self::allocate_zeroes(self, offset, length)
    }

    fn runs(
        &self,
        offset: u64,
        length: u64,
        most: usize,
        each: &mut dyn FnMut(Run),
    ) -> Result<(), ExportError> {
        self.block_status(offset, length)?.take(most).for_each(each);
        Ok(())
    }

    fn hold(
        &self,
        offset: u64,
        length: u64,
        with: &mut dyn FnMut(&dyn export::Held),
    ) -> Result<(), ExportError> {
        with(&Self::hold(self, offset, length)?);
        Ok(())
    }
}

impl export::Held for Held<'_> {
    fn segments<'a>(&'a self, each: &mut dyn FnMut(Segment<'a>)) {
        Self::segments(self).for_each(each);
    }
}
