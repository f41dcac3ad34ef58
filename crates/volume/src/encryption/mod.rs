//! Encryption of pages that leave this host, so that a lender can neither read nor compare them.
//!
//! Only pages under one key in deterministic mode can be compared. A page of zeroes stays zeroes,
//! so that it takes no room at the lender. The lender can tell anyway how much of a lease is used.
//! Encryption adds nothing to a page. It yields a tag of 8 bytes for each page, which the borrower
//! keeps. So the borrower notices any page that it did not store at this place last.

mod polyval;
mod wide;

use std::fmt;

use aquifer_page::{LeaseId, PAGE_SIZE, is_zero};
use serde::{Deserialize, Serialize};

use crate::tags::{OF_ZEROES, tag_of};

use wide::Wide;

/// The key and the mode by which the pages of a lease are encrypted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Encryption {
    /// The key.
    pub key: EncryptionKey,
    /// The mode, which decides how far a lender can compare pages.
    pub mode: EncryptionMode,
}

/// Encryption modes, by how far a lender can compare pages without the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EncryptionMode {
    /// The lender can tell which pages under this key are equal, and keep one copy.
    Deterministic,
    /// The lender can tell only whether a page was written again, unchanged, at the same place.
    Random,
}

impl fmt::Display for EncryptionMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Deterministic => "deterministic",
            Self::Random => "random",
        })
    }
}

/// A key of 256 bits. It serializes as 64 hexadecimal digits, and `Debug` does not show it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct EncryptionKey([u8; 32]);

impl fmt::Debug for EncryptionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EncryptionKey")
    }
}

impl EncryptionKey {
    /// Returns a new random key.
    ///
    /// # Panics
    /// If the kernel gives no random bytes.
    pub fn random() -> Self {
        let mut key = [0; 32];
        key[..16].copy_from_slice(&LeaseId::random().0.to_le_bytes());
        key[16..].copy_from_slice(&LeaseId::random().0.to_le_bytes());
        Self(key)
    }
}

const NOT_A_KEY: &str = "a key needs 64 hexadecimal digits";

/// Bytes of a key's id.
const ID: usize = 8;

impl EncryptionKey {
    /// Returns an id by which people compare keys without seeing them: 16 hexadecimal digits.
    pub fn id(&self) -> String {
        let mut page = [0xff; PAGE_SIZE];
        Wide::new(&self.0, 2).encrypt(b"id", &mut page);
        hex(&page[..ID])
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl From<EncryptionKey> for String {
    fn from(key: EncryptionKey) -> Self {
        hex(&key.0)
    }
}

impl TryFrom<String> for EncryptionKey {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let digits = text.as_bytes();
        if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(NOT_A_KEY);
        }
        let mut key = [0; 32];
        for (byte, at) in key.iter_mut().zip((0..64).step_by(2)) {
            *byte = u8::from_str_radix(&text[at..at + 2], 16).map_err(|_| NOT_A_KEY)?;
        }
        Ok(Self(key))
    }
}

impl Encryption {
    /// Returns a new random key in mode [`EncryptionMode::Random`].
    pub fn random() -> Self {
        Self { key: EncryptionKey::random(), mode: EncryptionMode::Random }
    }
}

/// The cipher of one lease: encrypts and decrypts its pages.
pub struct PageCipher {
    wide: Wide,
    /// The lease, as part of the tweak that makes equal pages differ; `None` if they must not
    /// differ.
    lease: Option<LeaseId>,
}

impl fmt::Debug for PageCipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PageCipher")
    }
}

/// Bytes of the tweak: the lease's id and the page's number in the lease.
const TWEAK: usize = 24;

impl PageCipher {
    /// Makes the cipher of one lease.
    pub fn new(encryption: &Encryption, lease: LeaseId) -> Self {
        let lease = (encryption.mode == EncryptionMode::Random).then_some(lease);
        let tweak = if lease.is_some() { TWEAK } else { 0 };
        Self { wide: Wide::new(&encryption.key.0, tweak), lease }
    }

    /// Encrypts whole pages in place. `offset` is their offset in the lease, in bytes. Calls `made`
    /// with the number of each page in the lease and its tag.
    pub fn encrypt(&self, offset: u64, pages: &mut [u8], made: impl FnMut(u64, u64)) {
        self.each(offset, pages, |tweak, page| self.wide.encrypt(tweak, page), made);
    }

    /// Decrypts whole pages in place, as [`encrypt`](Self::encrypt). A page has the tag that it had
    /// when it was encrypted. A changed page, another page, or an earlier version of this page has
    /// that tag only by a chance of about 2^-64.
    pub fn decrypt(&self, offset: u64, pages: &mut [u8], found: impl FnMut(u64, u64)) {
        self.each(offset, pages, |tweak, page| self.wide.decrypt(tweak, page), found);
    }

    fn each(
        &self,
        offset: u64,
        pages: &mut [u8],
        turn: impl Fn(&[u8], &mut [u8; PAGE_SIZE]) -> u128,
        mut tagged: impl FnMut(u64, u64),
    ) {
        let (pages, rest) = pages.as_chunks_mut();
        debug_assert!(rest.is_empty() && offset.is_multiple_of(PAGE_SIZE as u64), "whole pages");
        for (number, page) in (offset / PAGE_SIZE as u64..).zip(pages) {
            // (A page encrypts to zeroes with a probability of 2^-32768.)
            if is_zero(page) {
                tagged(number, OF_ZEROES);
                continue;
            }
            let seed = match self.lease {
                None => turn(&[], page),
                Some(lease) => {
                    let mut tweak = [0; TWEAK];
                    tweak[..16].copy_from_slice(&lease.0.to_le_bytes());
                    tweak[16..].copy_from_slice(&number.to_le_bytes());
                    turn(&tweak, page)
                }
            };
            tagged(number, tag_of(seed as u64));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = PAGE_SIZE as u64;

    fn encrypted(encryption: &Encryption, lease: u128, offset: u64, byte: u8) -> Vec<u8> {
        let mut pages = vec![byte; PAGE_SIZE];
        PageCipher::new(encryption, LeaseId(lease)).encrypt(offset, &mut pages, |_, _| ());
        pages
    }

    #[test]
    fn equal_pages_stay_equal_only_in_deterministic_mode() {
        let (blue, red) = (Encryption::random(), Encryption::random());
        let shared = Encryption { mode: EncryptionMode::Deterministic, ..blue.clone() };
        assert_eq!(encrypted(&shared, 1, 0, 7), encrypted(&shared, 2, 5 * PAGE, 7));
        assert_ne!(encrypted(&shared, 1, 0, 7), encrypted(&shared, 1, 0, 8));
        let others = [
            encrypted(&Encryption { mode: EncryptionMode::Deterministic, ..red }, 1, 0, 7),
            encrypted(&blue, 1, 0, 7),
            encrypted(&blue, 2, 0, 7),
            encrypted(&blue, 1, PAGE, 7),
        ];
        for (at, one) in others.iter().enumerate() {
            assert_ne!(*one, encrypted(&shared, 1, 0, 7));
            assert!(others[at + 1..].iter().all(|other| one != other));
        }
        assert_eq!(encrypted(&blue, 1, 0, 7), encrypted(&blue, 1, 0, 7));
    }

    #[test]
    fn pages_decrypt_to_the_same_and_zeroes_stay_zeroes() {
        for mode in [EncryptionMode::Deterministic, EncryptionMode::Random] {
            let cipher = PageCipher::new(&Encryption { mode, ..Encryption::random() }, LeaseId(3));
            let plain: Vec<u8> = (0..4 * PAGE_SIZE)
                .map(|at| if at / PAGE_SIZE == 2 { 0 } else { at as u8 })
                .collect();
            let mut pages = plain.clone();
            let mut made = Vec::new();
            cipher.encrypt(8 * PAGE, &mut pages, |page, tag| made.push((page, tag)));
            assert_eq!(made.iter().map(|(page, _)| *page).collect::<Vec<_>>(), [8, 9, 10, 11]);
            assert_eq!(made[2].1, OF_ZEROES);
            let differ: Vec<_> = (0..4)
                .map(|page| {
                    pages[page * PAGE_SIZE..][..PAGE_SIZE] != plain[page * PAGE_SIZE..][..PAGE_SIZE]
                })
                .collect();
            assert_eq!(differ, [true, true, false, true]);
            let mut found = Vec::new();
            cipher.decrypt(8 * PAGE, &mut pages, |page, tag| found.push((page, tag)));
            assert!(pages == plain && found == made);
        }
    }

    #[test]
    fn a_page_of_another_place_version_or_content_has_another_tag() {
        let tag = |cipher: &PageCipher, offset: u64, encrypted: &[u8]| {
            let (mut page, mut tag) = (encrypted.to_vec(), 0);
            cipher.decrypt(offset, &mut page, |_, found| tag = found);
            tag
        };
        for mode in [EncryptionMode::Deterministic, EncryptionMode::Random] {
            let encryption = Encryption { mode, ..Encryption::random() };
            let cipher = PageCipher::new(&encryption, LeaseId(1));
            let right = encrypted(&encryption, 1, 0, 7);
            let expected = tag(&cipher, 0, &right);
            assert_ne!(expected, OF_ZEROES);
            for at in [0, 15, 16, 2000, PAGE_SIZE - 1] {
                let mut changed = right.clone();
                changed[at] ^= 1;
                assert_ne!(tag(&cipher, 0, &changed), expected, "byte {at}");
            }
            assert_ne!(tag(&cipher, 0, &encrypted(&encryption, 1, 0, 8)), expected);
            let is_random = mode == EncryptionMode::Random;
            assert_eq!(tag(&cipher, PAGE, &right) != expected, is_random);
            let other = PageCipher::new(&encryption, LeaseId(2));
            assert_eq!(tag(&other, 0, &right) != expected, is_random);
        }
    }

    #[test]
    fn a_key_is_written_down_and_never_shown() {
        let encryption = Encryption::random();
        let text = serde_json::to_string(&encryption).unwrap();
        assert_eq!(serde_json::from_str::<Encryption>(&text).unwrap(), encryption);
        let digits = String::from(encryption.key.clone());
        assert_eq!(encryption.key.id(), encryption.key.clone().id());
        assert_ne!(encryption.key.id(), EncryptionKey::random().id());
        assert!(!digits.contains(&encryption.key.id()));
        assert!(text.contains(&digits) && !format!("{encryption:?}").contains(&digits[..8]));
        assert!(serde_json::from_str::<Encryption>(&text.replace(&digits, "00")).is_err());
    }
}
