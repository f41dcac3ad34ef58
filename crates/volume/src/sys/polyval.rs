//! POLYVAL with AVX-512 and VPCLMULQDQ: four multiplications at a time.

use std::arch::x86_64::{
    __m128i, __m512i, _mm_clmulepi64_si128, _mm_set_epi64x, _mm_shuffle_epi32, _mm_slli_si128,
    _mm_srli_si128, _mm_xor_si128, _mm256_castsi256_si128, _mm256_extracti128_si256,
    _mm256_xor_si256, _mm512_castsi512_si256, _mm512_clmulepi64_epi128, _mm512_extracti64x4_epi64,
    _mm512_loadu_si512, _mm512_setzero_si512, _mm512_xor_si512, _mm512_zextsi128_si512,
};
use std::mem::transmute;

use aes::Block;
use polyval::Polyval;
use polyval::universal_hash::UniversalHash as _;

/// Blocks of a register.
const LANES: usize = 4;
/// Blocks whose products are added before they are reduced.
const GROUP: usize = 32;
/// `x^127 + x^126 + x^121` of the field's polynomial (RFC 8452, section 3), divided by `x^64`.
const MODULUS: i64 = 0xC200_0000_0000_0000_u64 as i64;

/// The powers of a key, the highest one first. Only a processor with the instructions has them.
pub(crate) struct Powers([Block; GROUP]);

impl Powers {
    /// `fresh` has the key, and has hashed no block. Returns `None` without the instructions.
    pub(crate) fn new(fresh: &Polyval, key: &Block) -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("pclmulqdq")
            && is_x86_feature_detected!("vpclmulqdq");
        if !has_all {
            return None;
        }
        let mut powers = [*key; GROUP];
        for at in (0..GROUP - 1).rev() {
            let mut hash = fresh.clone();
            hash.update(&[powers[at + 1]]);
            powers[at] = hash.finalize();
        }
        Some(Self(powers))
    }

    /// Returns the hash of what gave `state` so far, and of these blocks.
    pub(crate) fn update(&self, state: u128, blocks: &[Block]) -> u128 {
        // SAFETY: the processor has the instructions, as `new` found out.
        unsafe { self.update_with_avx512(state, blocks) }
    }

    #[target_feature(enable = "avx512f,avx2,pclmulqdq,vpclmulqdq")]
    fn update_with_avx512(&self, mut state: u128, blocks: &[Block]) -> u128 {
        let (head, groups) = blocks.split_at(blocks.len() % GROUP);
        if let Some((first, rest)) = head.split_first() {
            // Zeroes before the first block change nothing.
            let mut group = [Block::default(); GROUP];
            group[GROUP - rest.len()..].copy_from_slice(rest);
            group[GROUP - head.len()] =
                (u128::from_le_bytes((*first).into()) ^ state).to_le_bytes().into();
            state = self.add(0, &group);
        }
        let (groups, _) = groups.as_chunks();
        groups.iter().fold(state, |state, group| self.add(state, group))
    }

    /// Multiplies each block by its power, and returns the sum.
    #[target_feature(enable = "avx512f,avx2,pclmulqdq,vpclmulqdq")]
    fn add(&self, state: u128, group: &[Block; GROUP]) -> u128 {
        let state = _mm_set_epi64x((state >> 64) as i64, state as i64);
        let mut state = _mm512_zextsi128_si512(state);
        let [mut low, mut middle, mut high] = [_mm512_setzero_si512(); 3];
        for (blocks, powers) in group.chunks_exact(LANES).zip(self.0.chunks_exact(LANES)) {
            let (blocks, powers) = (_mm512_xor_si512(load(blocks), state), load(powers));
            state = _mm512_setzero_si512();
            low = _mm512_xor_si512(low, _mm512_clmulepi64_epi128::<0x00>(blocks, powers));
            high = _mm512_xor_si512(high, _mm512_clmulepi64_epi128::<0x11>(blocks, powers));
            let cross = _mm512_xor_si512(
                _mm512_clmulepi64_epi128::<0x01>(blocks, powers),
                _mm512_clmulepi64_epi128::<0x10>(blocks, powers),
            );
            middle = _mm512_xor_si512(middle, cross);
        }
        let (low, middle, high) = (sum(low), sum(middle), sum(high));
        let low = _mm_xor_si128(low, _mm_slli_si128::<8>(middle));
        let high = _mm_xor_si128(high, _mm_srli_si128::<8>(middle));
        let reduced = _mm_xor_si128(high, halve(halve(low)));
        // SAFETY: both have 16 bytes, which may have any values.
        unsafe { transmute::<__m128i, u128>(reduced) }
    }
}

/// Divides by `x^64` in the field.
#[target_feature(enable = "pclmulqdq")]
fn halve(value: __m128i) -> __m128i {
    let added = _mm_clmulepi64_si128::<0x00>(value, _mm_set_epi64x(0, MODULUS));
    _mm_xor_si128(_mm_shuffle_epi32::<0x4E>(value), added)
}

/// Adds the four lanes.
#[target_feature(enable = "avx512f,avx2")]
fn sum(lanes: __m512i) -> __m128i {
    let upper = _mm512_extracti64x4_epi64::<1>(lanes);
    let half = _mm256_xor_si256(_mm512_castsi512_si256(lanes), upper);
    _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half))
}

#[target_feature(enable = "avx512f")]
fn load(blocks: &[Block]) -> __m512i {
    assert_eq!(blocks.len(), LANES);
    // SAFETY: these are 64 bytes.
    unsafe { _mm512_loadu_si512(blocks.as_ptr().cast()) }
}
