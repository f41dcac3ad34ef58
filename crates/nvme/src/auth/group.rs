//! Diffie-Hellman over the groups that NVMe defines.

use std::sync::LazyLock;

use num_bigint::BigUint;
use ring::rand::{SecureRandom, SystemRandom};

/// A Diffie-Hellman group (Base, section 8.13.5, "Diffie-Hellman group identifiers"; RFC 7919,
/// appendix A).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Group {
    /// No exchange: an eavesdropper can guess the secret offline.
    Null,
    /// 2048 bits.
    Ffdhe2048,
    /// 3072 bits.
    Ffdhe3072,
    /// 4096 bits.
    Ffdhe4096,
    /// 6144 bits.
    Ffdhe6144,
    /// 8192 bits.
    Ffdhe8192,
}

/// Bits of a private exponent: more than RFC 7919 asks for with any of the groups.
const EXPONENT: usize = 512;

impl Group {
    /// All groups, ordered by identifier.
    pub const ALL: [Self; 6] = [
        Self::Null,
        Self::Ffdhe2048,
        Self::Ffdhe3072,
        Self::Ffdhe4096,
        Self::Ffdhe6144,
        Self::Ffdhe8192,
    ];

    /// Returns the group's identifier.
    pub fn id(self) -> u8 {
        self as u8
    }

    /// Returns the group with this identifier.
    pub fn with_id(id: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|group| group.id() == id)
    }

    /// Returns the size of the group's exponentials in bytes; 0 for the null group.
    pub fn length(self) -> usize {
        match self {
            Self::Null => 0,
            Self::Ffdhe2048 => 2048 / 8,
            Self::Ffdhe3072 => 3072 / 8,
            Self::Ffdhe4096 => 4096 / 8,
            Self::Ffdhe6144 => 6144 / 8,
            Self::Ffdhe8192 => 8192 / 8,
        }
    }

    fn prime(self) -> Option<&'static BigUint> {
        let index = usize::from(self.id()).checked_sub(1)?;
        PRIMES.get(index).map(|prime| &**prime)
    }
}

/// Primes of the groups other than the null group, computed on first use.
static PRIMES: [LazyLock<BigUint>; 5] = [
    LazyLock::new(|| prime(2048, 560_316)),
    LazyLock::new(|| prime(3072, 2_625_351)),
    LazyLock::new(|| prime(4096, 5_736_041)),
    LazyLock::new(|| prime(6144, 15_705_020)),
    LazyLock::new(|| prime(8192, 10_965_728)),
];

/// Computes 2^b - 2^(b-64) + (floor(2^(b-130) e) + X) 2^64 - 1, where X makes it a prime (RFC 7919,
/// appendix A).
fn prime(bits: usize, offset: u64) -> BigUint {
    let one = BigUint::from(1u8);
    let middle = (e(bits - 130) + offset) << 64;
    (&one << bits) - (&one << (bits - 64)) + middle - one
}

/// Computes floor(2^bits e) as the series of the inverse factorials.
fn e(bits: usize) -> BigUint {
    // Extra bits, so that the truncation of each term does not reach the wanted bits.
    const SPARE: usize = 64;
    let mut term = BigUint::from(1u8) << (bits + SPARE);
    let mut sum = BigUint::ZERO;
    for divisor in 1u32.. {
        if term == BigUint::ZERO {
            break;
        }
        sum += &term;
        term /= divisor;
    }
    sum >> SPARE
}

/// One end's part of a key agreement that keeps the key from an eavesdropper.
pub struct Exchange {
    prime: &'static BigUint,
    exponent: BigUint,
    length: usize,
}

impl std::fmt::Debug for Exchange {
    /// Leaves the exponent out.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exchange").field("length", &self.length).finish_non_exhaustive()
    }
}

impl Exchange {
    /// Begins an exchange; `None` for the null group, or if the kernel gives no random bytes.
    pub fn begin(group: Group) -> Option<Self> {
        let mut exponent = [0; EXPONENT / 8];
        SystemRandom::new().fill(&mut exponent).ok()?;
        let exponent = BigUint::from_bytes_be(&exponent);
        Some(Self { prime: group.prime()?, exponent, length: group.length() })
    }

    /// Returns the exponential, to be sent to the other end.
    pub fn exponential(&self) -> Vec<u8> {
        self.fill_up(&BigUint::from(2u8).modpow(&self.exponent, self.prime))
    }

    /// Returns the key for the other end's exponential; `None` if that is not in the group
    /// (RFC 7919, section 5.1).
    pub fn key(&self, theirs: &[u8]) -> Option<Vec<u8>> {
        let theirs = BigUint::from_bytes_be(theirs);
        let one = BigUint::from(1u8);
        let good = theirs > one && theirs < self.prime - one;
        good.then(|| self.fill_up(&theirs.modpow(&self.exponent, self.prime)))
    }

    fn fill_up(&self, number: &BigUint) -> Vec<u8> {
        let bytes = number.to_bytes_be();
        let mut filled = vec![0; self.length - bytes.len()];
        filled.extend(bytes);
        filled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn primes_are_those_of_rfc_7919() {
        let text = |group: Group| group.prime().unwrap().to_str_radix(16);
        let smallest = text(Group::Ffdhe2048);
        assert!(
            smallest.starts_with("ffffffffffffffffadf85458a2bb4a9aafdc5620273d3cf1"),
            "{smallest}"
        );
        assert!(smallest.ends_with("886b423861285c97ffffffffffffffff"), "{smallest}");
        for (group, end) in [
            (Group::Ffdhe3072, "25e41d2b66c62e37ffffffffffffffff"),
            (Group::Ffdhe4096, "c68a007e5e655f6affffffffffffffff"),
            (Group::Ffdhe6144, "a41d570d7938dad4a40e329cd0e40e65ffffffffffffffff"),
            (Group::Ffdhe8192, "d68c8bb7c5c6424cffffffffffffffff"),
        ] {
            let text = text(group);
            assert_eq!(text.len(), group.length() * 2);
            assert!(text.ends_with(end), "{group:?}: {text}");
        }
    }

    #[test]
    fn both_ends_get_the_same_key_and_refuse_what_gives_it_away() {
        let (ours, theirs) = (
            Exchange::begin(Group::Ffdhe2048).unwrap(),
            Exchange::begin(Group::Ffdhe2048).unwrap(),
        );
        let key = ours.key(&theirs.exponential()).unwrap();
        assert_eq!(key.len(), 256);
        assert_eq!(theirs.key(&ours.exponential()), Some(key));
        let almost = ours.prime - BigUint::from(1u8);
        for weak in [vec![], vec![0; 256], vec![1], almost.to_bytes_be(), ours.prime.to_bytes_be()]
        {
            assert_eq!(ours.key(&weak), None);
        }
        assert!(Exchange::begin(Group::Null).is_none());
    }
}
