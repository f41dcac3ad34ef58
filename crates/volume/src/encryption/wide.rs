//! HCTR2, a block cipher as wide as a page: P. Crowley, N. Huckleberry, E. Biggers,
//! "Length-preserving encryption with HCTR2" (2021).
//!
//! Every bit of an encrypted page depends on every bit of the page, and both are equally long.
//! Existing libraries encrypt one block of 16 bytes at a time, which takes 30 us a page. With many
//! blocks in flight it takes 0.6 to 3 us. Tests compare both results.

use aes::cipher::{BlockCipherDecrypt as _, BlockCipherEncrypt as _, KeyInit as _};
use aes::{Aes256, Aes256Dec, Block};
use aquifer_page::PAGE_SIZE;

use super::polyval::Hash;

/// Bytes of a block of AES and of POLYVAL.
const BLOCK: usize = 16;

/// Blocks of key stream made at a time. With AVX-512, the crate encrypts fewer than 64 one by one.
const BATCH: usize = 64;

/// The cipher, for one key and one length of tweaks.
pub(super) struct Wide {
    forth: Aes256,
    back: Aes256Dec,
    hash: Hash,
    /// The hash of the block that encodes the tweak's length.
    of_length: u128,
    /// `L` of the paper.
    mask: u128,
}

impl Wide {
    /// Makes the cipher for tweaks of `tweak_length` bytes.
    pub(super) fn new(key: &[u8; 32], tweak_length: usize) -> Self {
        let forth = Aes256::new(key.into());
        let derive = |number: u128| {
            let mut block = Block::from(number.to_le_bytes());
            forth.encrypt_block(&mut block);
            block
        };
        let hash = Hash::new(&derive(0));
        // The paper's `2|T| + 2`, for messages of whole blocks.
        let lengths = 2 * (tweak_length as u128 * 8) + 2;
        let of_length = hash.update(0, &[Block::from(lengths.to_le_bytes())]);
        let mask = number(&derive(1));
        Self { forth, back: Aes256Dec::new(key.into()), hash, of_length, mask }
    }

    /// Encrypts a page in place. Returns the seed of its key stream (`S` of the paper). It depends
    /// on all of the page and on the tweak. Without the key, nobody can make another encrypted page
    /// with this seed, or tell the seed of one.
    pub(super) fn encrypt(&self, tweak: &[u8], page: &mut [u8; PAGE_SIZE]) -> u128 {
        self.turn(tweak, page, |block| self.forth.encrypt_block(block))
    }

    /// Decrypts a page in place. Returns the seed of its key stream, as [`encrypt`](Self::encrypt).
    pub(super) fn decrypt(&self, tweak: &[u8], page: &mut [u8; PAGE_SIZE]) -> u128 {
        self.turn(tweak, page, |block| self.back.decrypt_block(block))
    }

    /// Applies the hash, the key stream and the hash again, around the cipher of the first block.
    fn turn(&self, tweak: &[u8], page: &mut [u8; PAGE_SIZE], cipher: impl Fn(&mut Block)) -> u128 {
        let tweaked = self.hash.update_padded(self.of_length, tweak);
        let (first, rest) = page.split_at_mut(BLOCK);
        let (rest, _) = Block::slice_as_chunks_mut(rest);
        let hash = |blocks: &[Block]| self.hash.update(tweaked, blocks);
        let mut head = [0; BLOCK];
        head.copy_from_slice(first);
        let masked = u128::from_le_bytes(head) ^ hash(rest);
        let mut turned = Block::from(masked.to_le_bytes());
        cipher(&mut turned);
        let turned = number(&turned);
        let seed = masked ^ turned ^ self.mask;
        self.stream(seed, rest);
        first.copy_from_slice(&(turned ^ hash(rest)).to_le_bytes());
        seed
    }

    /// Applies XCTR: XORs the counter into the seed instead of adding it.
    fn stream(&self, seed: u128, blocks: &mut [Block]) {
        let mut counter = 0;
        for batch in blocks.chunks_mut(BATCH) {
            let mut keys = [(); BATCH].map(|()| {
                counter += 1;
                Block::from((seed ^ counter).to_le_bytes())
            });
            self.forth.encrypt_blocks(&mut keys);
            for (block, key) in batch.iter_mut().zip(&keys) {
                *block = Block::from((number(block) ^ number(key)).to_le_bytes());
            }
        }
    }
}

pub(super) fn number(block: &Block) -> u128 {
    u128::from_le_bytes((*block).into())
}

#[cfg(test)]
mod tests {
    use hctr2_rs::Hctr2_256;

    use super::*;

    fn page(seed: u64) -> [u8; PAGE_SIZE] {
        let mut state = seed;
        std::array::from_fn(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
    }

    #[test]
    fn it_is_hctr2_as_others_have_it() {
        for (seed, tweak) in [(1, &b""[..]), (2, b"a"), (3, &[7; 24]), (4, &[9; 16])] {
            let mut key = [0; 32];
            key.copy_from_slice(&page(seed + 100)[..32]);
            let (ours, theirs) = (Wide::new(&key, tweak.len()), Hctr2_256::new(&key));
            let plain = page(seed);
            let mut expected = [0; PAGE_SIZE];
            theirs.encrypt(&plain, tweak, &mut expected).unwrap();
            let mut encrypted = plain;
            let seed = ours.encrypt(tweak, &mut encrypted);
            assert!(encrypted == expected);
            // The second block is encrypted with AES of the seed XOR 1.
            let mut second =
                Block::from(std::array::from_fn(|at| plain[16 + at] ^ expected[16 + at]));
            Aes256Dec::new(&key.into()).decrypt_block(&mut second);
            assert_eq!(seed, number(&second) ^ 1);
            assert_eq!(ours.decrypt(tweak, &mut encrypted), seed);
            assert!(encrypted == plain);
        }
    }

    #[test]
    fn a_bit_changes_half_of_all() {
        let wide = Wide::new(&[5; 32], 0);
        let (mut one, mut other) = (page(1), page(1));
        other[PAGE_SIZE - 1] ^= 1;
        wide.encrypt(b"", &mut one);
        wide.encrypt(b"", &mut other);
        let differ: u32 = one.iter().zip(&other).map(|(a, b)| (a ^ b).count_ones()).sum();
        let half = PAGE_SIZE as u32 * 4;
        assert!(differ.abs_diff(half) < half / 16, "{differ} of {}", half * 2);
    }
}
