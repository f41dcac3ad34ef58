use aquifer_page::Bytes;

use super::Config;

/// The unit of resizes, never zero. Numbers of sections are plain `u64`s within this module.
#[derive(Clone, Copy, Debug)]
pub(super) struct Section(u64);

impl Section {
    pub(super) fn new(bytes: Bytes) -> Option<Self> {
        (bytes > Bytes::ZERO).then_some(Self(bytes.0))
    }

    /// The fewest sections that hold so much: how a VM grows.
    pub(super) fn up(self, bytes: Bytes) -> u64 {
        bytes.0.div_ceil(self.0)
    }

    /// The most sections that fit in so much: how a VM shrinks.
    pub(super) fn down(self, bytes: Bytes) -> u64 {
        bytes.0 / self.0
    }

    pub(super) fn bytes(self, sections: u64) -> Bytes {
        Bytes(self.0.saturating_mul(sections))
    }

    pub(super) fn half(self) -> Bytes {
        Bytes(self.0 / 2)
    }

    /// How far from its slack a VM may be without being moved: half a section of use, and the slack on it.
    pub(super) fn band(self, config: &Config) -> Bytes {
        self.half().scaled(1.0 + config.slack)
    }
}
