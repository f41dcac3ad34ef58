//! Effects of commands on blocks, apart from their transport.

use aquifer_page::export::{ExportError, Segment};
use aquifer_page::{PAGE_SIZE, is_zero};

use super::Namespace;
use crate::proto::NvmeStatus;
use crate::proto::command::io;

/// Returns offset and length in bytes of a range of blocks, if it is inside the namespace.
pub(super) fn range(
    namespace: &Namespace,
    start: u64,
    blocks: u64,
) -> Result<(u64, u64), NvmeStatus> {
    let block = PAGE_SIZE as u64;
    let there = namespace.size().0 / block;
    match start.checked_add(blocks) {
        Some(end) if end <= there => Ok((start * block, blocks * block)),
        _ => Err(NvmeStatus::LBA_OUT_OF_RANGE.final_()),
    }
}

/// Writes the data, or compares it with the stored data.
pub(super) fn apply(namespace: &Namespace, opcode: u8, offset: u64, data: &[u8]) -> NvmeStatus {
    let result = match opcode {
        io::WRITE => namespace.lease().write(offset, data).map(|()| true),
        _ => is_equal(namespace, offset, data),
    };
    match result {
        Ok(true) => NvmeStatus::SUCCESS,
        Ok(false) => NvmeStatus::COMPARE_FAILURE.final_(),
        Err(error) => status_of(&error),
    }
}

fn is_equal(namespace: &Namespace, offset: u64, mut data: &[u8]) -> Result<bool, ExportError> {
    let mut is_equal = true;
    namespace.lease().hold(offset, data.len() as u64, &mut |held| {
        held.segments(&mut |segment| {
            let ours = take(&mut data, segment.len());
            is_equal &= match segment {
                Segment::Data(there) => ours == there,
                Segment::Hole(_) => is_zero(ours),
            }
        });
    })?;
    Ok(is_equal)
}

fn take<'a>(data: &mut &'a [u8], length: usize) -> &'a [u8] {
    let (now, rest) = data.split_at(length);
    *data = rest;
    now
}

/// Makes a range zero and frees its RAM.
pub(super) fn discard(namespace: &Namespace, offset: u64, length: u64) -> NvmeStatus {
    namespace
        .lease()
        .discard(offset, length)
        .map_or_else(|error| status_of(&error), |()| NvmeStatus::SUCCESS)
}

/// Translates an error of the lease into a status.
pub(super) fn status_of(error: &ExportError) -> NvmeStatus {
    let status = match error {
        ExportError::Range { .. } => NvmeStatus::LBA_OUT_OF_RANGE,
        ExportError::Full { .. } | ExportError::NoMemory { .. } => NvmeStatus::CAPACITY_EXCEEDED,
        ExportError::Gone(_) => NvmeStatus::INVALID_NAMESPACE,
    };
    status.final_()
}
