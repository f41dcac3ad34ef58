//! The versions of pages that `examples/shared_writer.rs` writes and the test that kills it
//! expects.

use aquifer_page::PAGE_SIZE;

/// Number of threads, each with a lease.
pub const THREADS: usize = 4;
/// Number of pages of each lease.
pub const PAGES: usize = 512;
/// The groups to which the leases belong in turn.
pub const GROUPS: [&str; 2] = ["red", "blue"];

/// Returns the content of a page at this version, or `None` for a hole.
///
/// Many pages have equal or nearly equal contents.
pub fn content(page: usize, version: u32) -> Option<[u8; PAGE_SIZE]> {
    let kind = (page as u32 ^ version).wrapping_mul(0x9e37_79b9) >> 26;
    if version == 0 || kind == 0 {
        return None;
    }
    let mut content = [kind as u8; PAGE_SIZE];
    if kind > 48 {
        // Content that no other page or version has.
        content[..4].copy_from_slice(&(page as u32).to_le_bytes());
        content[PAGE_SIZE - 4..].copy_from_slice(&version.to_le_bytes());
    }
    Some(content)
}
