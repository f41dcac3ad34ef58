//! Digests: CRC32C over headers and data (TCP, section 3.3.1.1).

use zerocopy::byteorder::little_endian::U32;

/// Returns the digest of `bytes`, in wire format.
pub fn of(bytes: &[u8]) -> U32 {
    crc32c::crc32c(bytes).into()
}

/// The digest of data that comes in pieces.
#[derive(Clone, Copy, Debug, Default)]
pub struct Running(u32);

impl Running {
    /// Adds a piece.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0 = crc32c::crc32c_append(self.0, bytes);
    }

    /// Returns the digest of all pieces, in wire format.
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
