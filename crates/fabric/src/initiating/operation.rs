//! What a connection can be asked to do.

/// The most requests in flight.
pub(crate) const WINDOW: usize = 64;

/// One request of a connection's `run`.
#[derive(Debug)]
pub enum Operation<'a> {
    /// Fill the slice.
    Read {
        /// First byte.
        offset: u64,
        /// Where the bytes go.
        into: &'a mut [u8],
    },
    /// Write the slice.
    Write {
        /// First byte.
        offset: u64,
        /// The bytes.
        from: &'a [u8],
    },
    /// Give the range's room back.
    Trim {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u32,
    },
    /// Make the range read as zeroes.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u32,
    },
    /// Make what was acknowledged permanent.
    Flush,
    /// Append to `runs` which parts of the range are holes. Of NBD only.
    BlockStatus {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u32,
        /// Where the runs go.
        runs: &'a mut Vec<Run>,
    },
}

/// A part of an export that is alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Bytes.
    pub length: u32,
    /// Whether it takes no room and reads as zeroes.
    pub hole: bool,
}

impl Operation<'_> {
    pub(crate) fn range(&self) -> (u64, u64) {
        match self {
            Self::Read { offset, into } => (*offset, into.len() as u64),
            Self::Write { offset, from } => (*offset, from.len() as u64),
            Self::Trim { offset, length }
            | Self::WriteZeroes { offset, length }
            | Self::BlockStatus { offset, length, .. } => (*offset, u64::from(*length)),
            Self::Flush => (0, 0),
        }
    }

    /// Whether there is anything to do: the specification leaves open what requests for no bytes are.
    pub(crate) fn is_empty(&self) -> bool {
        !matches!(self, Self::Flush) && self.range().1 == 0
    }
}

/// How many operations of the front may be in flight together, `most` at most.
///
/// Reads and writes do not mix: while we would wait for the server to take data, it could wait for us to take data.
pub(crate) fn round_length(operations: &[Operation<'_>], most: usize) -> usize {
    let kind = |operation: &Operation<'_>| match operation {
        Operation::Read { .. } => Some(true),
        Operation::Write { .. } => Some(false),
        _ => None,
    };
    let first = operations.iter().find_map(kind);
    let same = |operation: &&Operation<'_>| kind(operation).is_none() || kind(operation) == first;
    operations.iter().take(most).take_while(same).count()
}
