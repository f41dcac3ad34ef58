//! The unit of resizes, and the arithmetic on it.

use aquifer_page::Bytes;

use super::Config;

/// The unit of resizes, never zero. Within this module, numbers of sections are plain `u64`s.
#[derive(Clone, Copy, Debug)]
pub(super) struct Section(u64);

impl Section {
    pub(super) fn new(bytes: Bytes) -> Option<Self> {
        (bytes > Bytes::ZERO).then_some(Self(bytes.0))
    }

    /// Returns the fewest sections that hold `bytes`, as for a VM that grows.
    pub(super) fn up(self, bytes: Bytes) -> u64 {
        bytes.0.div_ceil(self.0)
    }

    /// Returns the most sections that fit in `bytes`, as for a VM that shrinks.
    pub(super) fn down(self, bytes: Bytes) -> u64 {
        bytes.0 / self.0
    }

    pub(super) fn bytes(self, sections: u64) -> Bytes {
        Bytes(self.0.saturating_mul(sections))
    }

    pub(super) fn half(self) -> Bytes {
        Bytes(self.0 / 2)
    }

    /// Returns how far a VM may be from its slack without moving: half a section of use, and the
    /// slack on that.
    pub(super) fn band(self, config: &Config) -> Bytes {
        self.half().scaled(1.0 + config.slack)
    }
}
