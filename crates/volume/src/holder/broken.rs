//! A holder that cannot be used.

use aquifer_page::WorkerId;

use super::{Holder, HolderError};

/// Stands for a holder that cannot be opened. Each access fails for this reason.
pub(crate) struct BrokenHolder(pub(crate) String);

impl BrokenHolder {
    fn fail(&self) -> Result<(), HolderError> {
        Err(HolderError::Failed(self.0.clone().into()))
    }
}

impl Holder for BrokenHolder {
    fn read(&self, _worker: WorkerId, _at: u64, _into: &mut [u8]) -> Result<(), HolderError> {
        self.fail()
    }

    fn write(&self, _worker: WorkerId, _at: u64, _data: &[u8]) -> Result<(), HolderError> {
        self.fail()
    }

    fn discard(&self, _worker: WorkerId, _at: u64, _length: u64) -> Result<(), HolderError> {
        self.fail()
    }

    fn flush(&self, _worker: WorkerId) -> Result<(), HolderError> {
        self.fail()
    }
}
