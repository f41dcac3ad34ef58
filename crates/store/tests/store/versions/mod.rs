//! What `examples/shared_writer.rs` writes, and the test that kills it looks for.

use aquifer_page::PAGE_SIZE;

/// Threads, each with a lease.
pub const THREADS: usize = 4;
/// Pages of each lease.
pub const PAGES: usize = 512;
/// Whose the leases are, in turn.
pub const GROUPS: [&str; 2] = ["red", "blue"];

/// What is in a page when this version of it was written; nothing if it is a hole then. The same for many pages, or almost.
pub fn content(page: usize, version: u32) -> Option<[u8; PAGE_SIZE]> {
    let kind = (page as u32 ^ version).wrapping_mul(0x9e37_79b9) >> 26;
    if version == 0 || kind == 0 {
        return None;
    }
    let mut content = [kind as u8; PAGE_SIZE];
    if kind > 48 {
        // Nobody else's.
        content[..4].copy_from_slice(&(page as u32).to_le_bytes());
        content[PAGE_SIZE - 4..].copy_from_slice(&version.to_le_bytes());
    }
    Some(content)
}
