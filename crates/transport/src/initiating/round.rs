//! Record of the operations in flight.

use super::{Failure, Operation, WINDOW};

/// Operations in flight: which are open, failed or have block status, and how many bytes of their
/// data are missing.
#[derive(Debug)]
pub struct Round<F> {
    first: u64,
    open: u64,
    failed: u64,
    told: u64,
    missing: [u32; WINDOW],
    first_failure: Option<F>,
}

impl<F: Failure> Round<F> {
    /// Opens all operations that are not empty, and numbers the operations from `first` on.
    pub fn new(first: u64, operations: &[Operation<'_>]) -> Self {
        let mut round =
            Self { first, open: 0, failed: 0, told: 0, missing: [0; WINDOW], first_failure: None };
        for (index, operation) in operations.iter().enumerate() {
            if !operation.is_empty() {
                round.open |= 1 << index;
            }
            if let Operation::Read { into, .. } = operation {
                round.missing[index] = into.len() as u32;
            }
        }
        round
    }

    /// Returns the index of the open operation of this number.
    ///
    /// # Errors
    /// If there is none, the peer violates the protocol.
    pub fn index(&self, number: u64) -> Result<usize, F> {
        let index = number.wrapping_sub(self.first);
        match index < WINDOW as u64 && self.open >> index & 1 == 1 {
            true => Ok(index as usize),
            false => Err(F::protocol("an answer to an unknown request")),
        }
    }

    /// Returns the number of the operation at `index`.
    pub fn number(&self, index: usize) -> u64 {
        self.first + index as u64
    }

    /// Returns the number of bytes still to transfer.
    pub fn missing(&mut self, index: usize) -> &mut u32 {
        &mut self.missing[index]
    }

    /// Returns whether every operation is answered.
    pub fn is_over(&self) -> bool {
        self.open == 0
    }

    /// Marks the operation as failed; its last reply may still be in flight.
    pub fn fail(&mut self, index: usize, failure: F) {
        self.failed |= 1 << index;
        self.first_failure.get_or_insert(failure);
    }

    /// Notes that block status has arrived for the operation. Returns whether it had arrived
    /// earlier.
    pub fn tell(&mut self, index: usize) -> bool {
        let already = self.told >> index & 1 == 1;
        self.told |= 1 << index;
        already
    }

    /// Closes the operation after its last reply.
    ///
    /// # Errors
    /// If the reply reports success but data is missing, the peer violates the protocol.
    pub fn close(&mut self, index: usize) -> Result<(), F> {
        self.open &= !(1 << index);
        match self.failed >> index & 1 == 1 || self.missing[index] == 0 {
            true => Ok(()),
            false => Err(F::protocol("a success before all data was moved")),
        }
    }

    /// Returns the first failure, if there is one.
    ///
    /// # Errors
    /// That failure.
    pub fn result(self) -> Result<(), F> {
        self.first_failure.map_or(Ok(()), Err)
    }
}
