//! CRC32C over headers and data (TCP, section 3.3.1.1).

use zerocopy::byteorder::little_endian::U32;

/// The digest of `bytes`, as it is on the wire.
pub fn of(bytes: &[u8]) -> U32 {
    crc32c::crc32c(bytes).into()
}

/// The digest of bytes that come in pieces.
#[derive(Clone, Copy, Debug, Default)]
pub struct Running(u32);

impl Running {
    /// Adds a piece.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0 = crc32c::crc32c_append(self.0, bytes);
    }

    /// The digest of all pieces.
    pub fn value(self) -> U32 {
        self.0.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_of_the_iscsi_standard() {
        // RFC 7143, appendix A.4.
        assert_eq!(of(&[0; 32]).get(), 0x8a91_36aa);
        assert_eq!(of(&[0xff; 32]).get(), 0x62a8_ab43);
        let mut running = Running::default();
        running.add(&[0; 10]);
        running.add(&[0; 22]);
        assert_eq!(running.value(), of(&[0; 32]));
    }
}
