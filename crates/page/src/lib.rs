//! Pages, extents, sizes and names: the vocabulary of all other crates.
//!
//! A **page** (4 KiB) is the unit of transfer. An **extent** (64 MiB) is the unit of promise and
//! placement.

pub mod blocks;
mod bytes;
pub mod export;
pub mod file;
mod index;
mod name;
pub mod visitor;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use bytes::{Bytes, ParseBytesError};
pub use index::{ExtentIndex, FrameIndex, PageIndex, WorkerId};
pub use name::{
    ClientId, Group, HostName, Incarnation, LeaseId, MigrationId, NameError, OwnerId, RegionName,
    VolumeId, Zone,
};

/// Bytes in a page, the unit of transfer.
pub const PAGE_SIZE: usize = 4096;

/// The size and alignment of a huge page, in bytes.
pub const HUGE_PAGE_SIZE: usize = 2 << 20;

/// Bytes in an extent, the unit in which lenders promise memory and borrowers place it.
pub const EXTENT_SIZE: u64 = 64 << 20;

/// Pages in an extent.
pub const PAGES_PER_EXTENT: u64 = EXTENT_SIZE / PAGE_SIZE as u64;

static ZERO_PAGE: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// Returns whether every byte of `data` (of any length) is zero.
///
/// Compares with a page of zeroes at the speed of `memcmp`, and stops at the first page that
/// differs.
pub fn is_zero(data: &[u8]) -> bool {
    data.chunks(PAGE_SIZE).all(|chunk| chunk == &ZERO_PAGE[..chunk.len()])
}

/// Locks a mutex, poisoned or not: a thread that panics under a lock leaves nothing half done.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_set_bit_anywhere_makes_data_non_zero() {
        for len in [0, 1, 4095, 4096, 4097, 3 * PAGE_SIZE + 7] {
            let mut data = vec![0; len];
            assert!(is_zero(&data), "{len} zero bytes");
            for at in [0, len / 2, len.saturating_sub(1)] {
                if len > 0 {
                    data[at] = 0x80;
                    assert!(!is_zero(&data), "{len} bytes, set at {at}");
                    data[at] = 0;
                }
            }
        }
    }
}
