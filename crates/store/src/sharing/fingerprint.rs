//! Keyed fingerprints of pages.

use std::fmt;

use aquifer_page::PAGE_SIZE;
use twox_hash::XxHash3_64;

/// Bytes of key, as many as the algorithm's own default.
const KEY: usize = 192;

/// The key of a group's fingerprints: random, never disclosed, never stored, and new for each group
/// and each open of the store.
///
/// The fingerprint is XXH3 with a secret. A cryptographic hash would take several times as long as
/// the rest of a write. XXH3 is enough, as a fingerprint only says where to look: the store
/// compares contents byte by byte. Of several contents with one fingerprint the index has one, and
/// the others stay unshared. So an attacker gains nothing, even with the key: each collision
/// costs its maker a page of RAM and a comparison.
pub(super) struct Key {
    seed: u64,
    secret: [u8; KEY],
}

impl Key {
    /// Makes a new random key.
    pub(super) fn random() -> Self {
        let (mut seed, mut secret) = ([0; 8], [0; KEY]);
        getrandom::fill(&mut seed)
            .and_then(|()| getrandom::fill(&mut secret))
            .expect("the kernel gives random bytes");
        Self { seed: u64::from_le_bytes(seed), secret }
    }

    /// Computes the fingerprint of a page.
    pub(super) fn fingerprint(&self, content: &[u8; PAGE_SIZE]) -> u64 {
        XxHash3_64::oneshot_with_seed_and_secret(self.seed, &self.secret, content)
            .expect("a secret that is long enough")
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprints_tell_contents_apart_and_keys_too() {
        let (key, other) = (Key::random(), Key::random());
        let mut page = [7; PAGE_SIZE];
        let fingerprint = key.fingerprint(&page);
        assert_eq!(fingerprint, key.fingerprint(&page));
        assert_ne!(fingerprint, other.fingerprint(&page));
        page[PAGE_SIZE - 1] = 8;
        assert_ne!(fingerprint, key.fingerprint(&page));
    }
}
