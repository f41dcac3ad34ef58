//! Operations that a connection carries out.

/// Most requests in flight.
pub const WINDOW: usize = 64;

/// One request for a connection's `run`.
#[derive(Debug)]
pub enum Operation<'a> {
    /// Reads into the slice.
    Read {
        /// Offset in bytes.
        offset: u64,
        /// Destination of the bytes.
        into: &'a mut [u8],
    },
    /// Writes the slice.
    Write {
        /// Offset in bytes.
        offset: u64,
        /// Bytes to write.
        from: &'a [u8],
    },
    /// Frees the storage of the range.
    Trim {
        /// Offset in bytes.
        offset: u64,
        /// Length in bytes.
        length: u32,
    },
    /// Makes the range read as zeroes.
    WriteZeroes {
        /// Offset in bytes.
        offset: u64,
        /// Length in bytes.
        length: u32,
    },
    /// Makes acknowledged writes permanent.
    Flush,
    /// Appends to `runs` which parts of the range are holes. NBD only.
    BlockStatus {
        /// Offset in bytes.
        offset: u64,
        /// Length in bytes.
        length: u32,
        /// Destination of the runs.
        runs: &'a mut Vec<Run>,
    },
}

/// Part of an export that is all hole or all data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Length in bytes.
    pub length: u32,
    /// Whether the part occupies no storage and reads as zeroes.
    pub hole: bool,
}

impl Operation<'_> {
    /// Returns offset and length in bytes.
    pub fn range(&self) -> (u64, u64) {
        match self {
            Self::Read { offset, into } => (*offset, into.len() as u64),
            Self::Write { offset, from } => (*offset, from.len() as u64),
            Self::Trim { offset, length }
            | Self::WriteZeroes { offset, length }
            | Self::BlockStatus { offset, length, .. } => (*offset, u64::from(*length)),
            Self::Flush => (0, 0),
        }
    }

    /// Returns whether there is nothing to do. The specifications leave requests for no bytes open.
    pub fn is_empty(&self) -> bool {
        !matches!(self, Self::Flush) && self.range().1 == 0
    }
}

/// Returns how many operations at the front may be in flight together, at most `most`.
///
/// Reads and writes do not mix. While this end waits for the server to take data, the server could
/// wait for this end to do so.
pub(super) fn round_length(operations: &[Operation<'_>], most: usize) -> usize {
    let kind = |operation: &Operation<'_>| match operation {
        Operation::Read { .. } => Some(true),
        Operation::Write { .. } => Some(false),
        _ => None,
    };
    let first = operations.iter().find_map(kind);
    let same = |operation: &&Operation<'_>| kind(operation).is_none() || kind(operation) == first;
    operations.iter().take(most).take_while(same).count()
}
