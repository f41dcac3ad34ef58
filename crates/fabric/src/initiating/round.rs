use super::operation::{Operation, WINDOW, round_length};

/// The operations in flight: which ones are open, which have failed, which were told of holes, and how much of their data
/// has not moved yet.
pub(crate) struct Round<F> {
    first: u64,
    open: u64,
    failed: u64,
    told: u64,
    missing: [u32; WINDOW],
    first_failure: Option<F>,
}

impl<F> Round<F> {
    /// All operations that have anything to do; they are known as `first` and the numbers that follow.
    pub(crate) fn new(first: u64, operations: &[Operation<'_>]) -> Self {
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

    /// The place of the open operation of this number; `None` if there is none.
    pub(crate) fn index(&self, number: u64) -> Option<usize> {
        let index = number.wrapping_sub(self.first);
        (index < WINDOW as u64 && self.open >> index & 1 == 1).then_some(index as usize)
    }

    /// The number of the operation at this place.
    pub(crate) fn number(&self, index: usize) -> u64 {
        self.first + index as u64
    }

    /// Bytes that have not come or gone yet.
    pub(crate) fn missing(&mut self, index: usize) -> &mut u32 {
        &mut self.missing[index]
    }

    /// Whether all is answered.
    pub(crate) fn is_over(&self) -> bool {
        self.open == 0
    }

    /// The operation has failed, but its last reply may not have come yet.
    pub(crate) fn fail(&mut self, index: usize, failure: F) {
        self.failed |= 1 << index;
        self.first_failure.get_or_insert(failure);
    }

    /// The operation is told of holes. Whether it was told already.
    pub(crate) fn tell(&mut self, index: usize) -> bool {
        let already = self.told >> index & 1 == 1;
        self.told |= 1 << index;
        already
    }

    /// That was the last reply to the operation. False if it is said to have succeeded and has not moved all its data.
    pub(crate) fn close(&mut self, index: usize) -> bool {
        self.open &= !(1 << index);
        self.failed >> index & 1 == 1 || self.missing[index] == 0
    }

    /// The first failure, if there was one.
    pub(crate) fn result(self) -> Result<(), F> {
        self.first_failure.map_or(Ok(()), Err)
    }
}

/// Does the operations in rounds of at most `most`.
pub(crate) fn in_rounds<'a, F>(
    mut operations: &mut [Operation<'a>],
    most: usize,
    mut round: impl FnMut(&mut [Operation<'a>]) -> Result<(), F>,
) -> Result<(), F> {
    while !operations.is_empty() {
        let (now, rest) = operations.split_at_mut(round_length(operations, most));
        round(now)?;
        operations = rest;
    }
    Ok(())
}
