use aquifer_page::PAGE_SIZE;
use arbitrary::Arbitrary;

/// A number of which the interesting ones are likely: small ones, whole pages, powers of two, and their neighbours.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Number {
    Small(u8),
    Pages(u8),
    NearPages(u16, i8),
    NearPower(u8, i8),
    Any(u64),
}

impl Number {
    /// As a count of bytes, or an offset.
    pub fn bytes(self) -> u64 {
        self.of(PAGE_SIZE as u64)
    }

    /// As a count of blocks of a page, or the place of one.
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
