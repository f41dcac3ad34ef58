//! POLYVAL (RFC 8452, section 3), with many blocks in flight.
//!
//! The crate `polyval` multiplies one pair of polynomials with an instruction, and reduces the sum
//! of 4 products. Processors with AVX-512 and VPCLMULQDQ multiply four pairs, and 32 products are
//! reduced. On other processors, and for short inputs, the crate hashes. Tests compare both.

use aes::Block;
use polyval::Polyval;
use polyval::universal_hash::UniversalHash as _;

use super::wide::number;
#[cfg(target_arch = "x86_64")]
use crate::sys::polyval::Powers;

/// Inputs of fewer blocks are hashed by the crate.
const FEW: usize = 16;

/// The hash, for one key.
pub(super) struct Hash {
    /// No block was hashed yet.
    fresh: Polyval,
    #[cfg(target_arch = "x86_64")]
    powers: Option<Powers>,
}

impl Hash {
    pub(super) fn new(key: &Block) -> Self {
        let fresh = Polyval::new(key);
        #[cfg(target_arch = "x86_64")]
        let powers = Powers::new(&fresh, key);
        Self {
            fresh,
            #[cfg(target_arch = "x86_64")]
            powers,
        }
    }

    /// Returns the hash of what gave `state` so far, and of these blocks. It begins with 0.
    pub(super) fn update(&self, state: u128, blocks: &[Block]) -> u128 {
        #[cfg(target_arch = "x86_64")]
        if let Some(powers) = self.powers.as_ref().filter(|_| blocks.len() >= FEW) {
            return powers.update(state, blocks);
        }
        let Some((first, rest)) = blocks.split_first() else { return state };
        let mut hash = self.fresh.clone();
        hash.update(&[Block::from((number(first) ^ state).to_le_bytes())]);
        hash.update(rest);
        number(&hash.finalize())
    }

    /// As [`update`](Self::update), for bytes that zeroes fill up to whole blocks.
    pub(super) fn update_padded(&self, state: u128, bytes: &[u8]) -> u128 {
        bytes.chunks(size_of::<Block>()).fold(state, |state, bytes| {
            let mut padded = Block::default();
            padded[..bytes.len()].copy_from_slice(bytes);
            self.update(state, &[padded])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(seed: u64, count: usize) -> Vec<Block> {
        let mut state = seed;
        let byte = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(seed | 1);
            (state >> 56) as u8
        };
        let mut bytes = std::iter::repeat_with(|| ()).map(byte);
        (0..count).map(|_| Block::from(std::array::from_fn(|_| bytes.next().unwrap()))).collect()
    }

    #[test]
    fn many_blocks_hash_as_in_the_crate() {
        let [key] = blocks(1, 1)[..] else { unreachable!() };
        let without_avx512 = Hash {
            #[cfg(target_arch = "x86_64")]
            powers: None,
            ..Hash::new(&key)
        };
        let hashes = [Hash::new(&key), without_avx512];
        for count in 0..300 {
            let (before, all) = (blocks(2, count % 5), blocks(3 + count as u64, count));
            let mut expected = Polyval::new(&key);
            expected.update(&before);
            expected.update(&all);
            let expected = number(&expected.finalize());
            for hash in &hashes {
                let found = hash.update(hash.update(0, &before), &all);
                assert_eq!(found, expected, "{count} blocks");
            }
        }
    }

    /// RFC 8452, appendix A.
    #[test]
    fn it_gives_what_the_standard_gives() {
        let hex = |text: &str| {
            let number = u128::from_str_radix(text, 16).unwrap();
            Block::from(number.to_be_bytes())
        };
        let hash = Hash::new(&hex("25629347589242761d31f826ba4b757b"));
        let input =
            [hex("4f4f95668c83dfb6401762bb2d01a262"), hex("d1a24ddd2721d006bbe45f20d3c9f362")];
        let expected = hex("f7a3b47b846119fae5b7866cf5e5b77e");
        assert_eq!(hash.update(0, &input), number(&expected));
        // Zeroes before it change nothing, and make the input long.
        let mut long = vec![Block::default(); 2 * FEW];
        long.extend(input);
        assert_eq!(hash.update(0, &long), number(&expected));
        let mut bytes = input.concat();
        assert_eq!(hash.update_padded(0, &bytes), number(&expected));
        bytes.truncate(20);
        let mut padded = input;
        padded[1][4..].fill(0);
        assert_eq!(hash.update_padded(0, &bytes), hash.update(0, &padded));
    }
}
