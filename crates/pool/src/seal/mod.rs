//! Pages that leave this host are sealed: a lender can neither read them nor compare them with those of another key.
//!
//! A page of zeroes stays one, so that it takes no room with the lender, which can tell how much of a lease is used in any case. Nothing is added to a
//! page, and nothing has to be kept of it; so a lender that changes a sealed page is not found out: what comes back is noise.

mod wide;

use std::fmt;

use aquifer_page::{LeaseId, PAGE_SIZE, is_zero};
use serde::{Deserialize, Serialize};

use wide::Wide;

/// How pages of a lease are sealed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seal {
    /// The key.
    pub key: SealKey,
    /// What of them can be told without it.
    pub sealing: Sealing,
}

/// What can be told of sealed pages without the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sealing {
    /// Which pages of all that have this key are equal: the lender can keep one of them.
    Deterministic,
    /// Whether a page has been written anew as it was, at the same place; nothing of two pages.
    Random,
}

impl fmt::Display for Sealing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Deterministic => "deterministic",
            Self::Random => "random",
        })
    }
}

/// 256 bits, as 64 hexadecimal digits where they are written down. Never shown.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SealKey([u8; 32]);

impl fmt::Debug for SealKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SealKey")
    }
}

impl SealKey {
    /// A new one.
    ///
    /// # Panics
    /// If the kernel has no randomness to give, which Linux only does before it has booted.
    pub fn random() -> Self {
        let mut key = [0; 32];
        key[..16].copy_from_slice(&LeaseId::random().0.to_le_bytes());
        key[16..].copy_from_slice(&LeaseId::random().0.to_le_bytes());
        Self(key)
    }
}

/// Bytes by which to tell keys apart.
const ID: usize = 8;

impl SealKey {
    /// By what people tell whether two keys are the same, without seeing them: 16 hexadecimal digits.
    pub fn id(&self) -> String {
        let mut page = [0xff; PAGE_SIZE];
        Wide::new(&self.0, 2).seal(b"id", &mut page);
        hex(&page[..ID])
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl From<SealKey> for String {
    fn from(key: SealKey) -> Self {
        hex(&key.0)
    }
}

impl TryFrom<String> for SealKey {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let digits = text.as_bytes();
        if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err("a key is of 64 hexadecimal digits");
        }
        let mut key = [0; 32];
        for (byte, at) in key.iter_mut().zip((0..64).step_by(2)) {
            *byte =
                u8::from_str_radix(&text[at..at + 2], 16).map_err(|_| "no hexadecimal digits")?;
        }
        Ok(Self(key))
    }
}

impl Seal {
    /// With a key that nobody else has.
    pub fn own() -> Self {
        Self { key: SealKey::random(), sealing: Sealing::Random }
    }
}

/// Seals the pages of a lease.
pub struct Sealer {
    wide: Wide,
    /// What pages of a lease have that no others do, where equal ones are not to be alike.
    lease: Option<LeaseId>,
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sealer")
    }
}

/// The lease, and the page's number in it.
const TWEAK: usize = 24;

impl Sealer {
    /// Of one lease.
    pub fn new(seal: &Seal, lease: LeaseId) -> Self {
        let lease = (seal.sealing == Sealing::Random).then_some(lease);
        let tweak = if lease.is_some() { TWEAK } else { 0 };
        Self { wide: Wide::new(&seal.key.0, tweak), lease }
    }

    /// Seals whole pages that are for `offset` of the lease.
    pub fn seal(&self, offset: u64, pages: &mut [u8]) {
        self.each(offset, pages, |tweak, page| self.wide.seal(tweak, page));
    }

    /// Opens whole pages that were at `offset` of the lease.
    pub fn open(&self, offset: u64, pages: &mut [u8]) {
        self.each(offset, pages, |tweak, page| self.wide.open(tweak, page));
    }

    fn each(&self, offset: u64, pages: &mut [u8], what: impl Fn(&[u8], &mut [u8; PAGE_SIZE])) {
        let (pages, rest) = pages.as_chunks_mut();
        debug_assert!(rest.is_empty() && offset.is_multiple_of(PAGE_SIZE as u64), "whole pages");
        for (number, page) in (offset / PAGE_SIZE as u64..).zip(pages) {
            // (That a page is sealed to zeroes happens once in 2 to the 32,768.)
            if is_zero(page) {
                continue;
            }
            match self.lease {
                None => what(&[], page),
                Some(lease) => {
                    let mut tweak = [0; TWEAK];
                    tweak[..16].copy_from_slice(&lease.0.to_le_bytes());
                    tweak[16..].copy_from_slice(&number.to_le_bytes());
                    what(&tweak, page);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = PAGE_SIZE as u64;

    fn sealed(seal: &Seal, lease: u128, offset: u64, byte: u8) -> Vec<u8> {
        let mut pages = vec![byte; PAGE_SIZE];
        Sealer::new(seal, LeaseId(lease)).seal(offset, &mut pages);
        pages
    }

    #[test]
    fn equal_pages_are_alike_under_one_key_only_where_that_is_wanted() {
        let (blue, red) = (Seal::own(), Seal::own());
        let shared = Seal { sealing: Sealing::Deterministic, ..blue.clone() };
        assert_eq!(sealed(&shared, 1, 0, 7), sealed(&shared, 2, 5 * PAGE, 7));
        assert_ne!(sealed(&shared, 1, 0, 7), sealed(&shared, 1, 0, 8));
        let others = [
            sealed(&Seal { sealing: Sealing::Deterministic, ..red }, 1, 0, 7),
            sealed(&blue, 1, 0, 7),
            sealed(&blue, 2, 0, 7),
            sealed(&blue, 1, PAGE, 7),
        ];
        for (at, one) in others.iter().enumerate() {
            assert_ne!(*one, sealed(&shared, 1, 0, 7));
            assert!(others[at + 1..].iter().all(|other| one != other));
        }
        assert_eq!(sealed(&blue, 1, 0, 7), sealed(&blue, 1, 0, 7));
    }

    #[test]
    fn what_was_sealed_is_opened_and_zeroes_stay_zeroes() {
        for sealing in [Sealing::Deterministic, Sealing::Random] {
            let sealer = Sealer::new(&Seal { sealing, ..Seal::own() }, LeaseId(3));
            let plain: Vec<u8> = (0..4 * PAGE_SIZE)
                .map(|at| if at / PAGE_SIZE == 2 { 0 } else { at as u8 })
                .collect();
            let mut pages = plain.clone();
            sealer.seal(8 * PAGE, &mut pages);
            let differ: Vec<_> = (0..4)
                .map(|page| {
                    pages[page * PAGE_SIZE..][..PAGE_SIZE] != plain[page * PAGE_SIZE..][..PAGE_SIZE]
                })
                .collect();
            assert_eq!(differ, [true, true, false, true]);
            sealer.open(8 * PAGE, &mut pages);
            assert!(pages == plain);
        }
    }

    #[test]
    fn a_key_is_written_down_and_never_shown() {
        let seal = Seal::own();
        let text = serde_json::to_string(&seal).unwrap();
        assert_eq!(serde_json::from_str::<Seal>(&text).unwrap(), seal);
        let digits = String::from(seal.key.clone());
        assert_eq!(seal.key.id(), seal.key.clone().id());
        assert!(seal.key.id() != SealKey::random().id() && !digits.contains(&seal.key.id()));
        assert!(text.contains(&digits) && !format!("{seal:?}").contains(&digits[..8]));
        assert!(serde_json::from_str::<Seal>(&text.replace(&digits, "00")).is_err());
    }
}
