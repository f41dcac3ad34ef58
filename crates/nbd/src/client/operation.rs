//! NBD requests for the operations of a connection.

use aquifer_transport::initiating::Operation;
use zerocopy::byteorder::big_endian::{U16, U32, U64};

use crate::proto::{REQUEST_MAGIC, Request, command};

pub(super) fn request_for(operation: &Operation<'_>, cookie: u64) -> Request {
    let (offset, length) = operation.range();
    // The cast keeps the value: the caller has checked that the length fits the largest payload.
    request(command_for(operation), cookie, offset, length as u32)
}

fn command_for(operation: &Operation<'_>) -> u16 {
    match operation {
        Operation::Read { .. } => command::READ,
        Operation::Write { .. } => command::WRITE,
        Operation::Trim { .. } => command::TRIM,
        Operation::WriteZeroes { .. } => command::WRITE_ZEROES,
        Operation::Flush => command::FLUSH,
        Operation::BlockStatus { .. } => command::BLOCK_STATUS,
    }
}

/// Returns a request without flags (NBD, "Request message").
fn request(command: u16, cookie: u64, offset: u64, length: u32) -> Request {
    Request {
        magic: U32::new(REQUEST_MAGIC),
        flags: U16::ZERO,
        command: U16::new(command),
        cookie: U64::new(cookie),
        offset: U64::new(offset),
        length: U32::new(length),
    }
}

/// Returns the request that ends a session; offset and length are zero, and it has no reply (NBD,
/// "NBD_CMD_DISC").
pub(super) fn farewell() -> Request {
    request(command::DISC, 0, 0, 0)
}
