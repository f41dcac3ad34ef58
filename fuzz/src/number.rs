//! Numbers for lengths and offsets, with the boundary cases made likely.

use aquifer_page::PAGE_SIZE;
use arbitrary::Arbitrary;

/// A number that is often a boundary case: small, whole pages, a power of two, or a neighbour of
/// these.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Number {
    Small(u8),
    Pages(u8),
    NearPages(u16, i8),
    NearPower(u8, i8),
    Any(u64),
}

impl Number {
    /// Returns the number as a count of bytes, or an offset in bytes.
    pub fn bytes(self) -> u64 {
        self.of(PAGE_SIZE as u64)
    }

    /// Returns the number as a count of page-sized blocks, or the index of one.
    pub fn blocks(self) -> u64 {
        self.of(1)
    }

    fn of(self, page: u64) -> u64 {
        match self {
            Self::Small(number) => number.into(),
            Self::Pages(pages) => u64::from(pages) * page,
            Self::NearPages(pages, by) => (u64::from(pages) * page).wrapping_add_signed(by.into()),
            Self::NearPower(shift, by) => (1u64 << (shift % 64)).wrapping_add_signed(by.into()),
            Self::Any(number) => number,
        }
    }
}
