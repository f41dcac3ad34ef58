use std::fmt;

use aquifer_page::PAGE_SIZE;
use twox_hash::XxHash3_64;

/// Bytes of key, as long as the algorithm's own default.
const KEY: usize = 192;

/// What a group's fingerprints are made with: random, never told, never stored, and another for each group and each time
/// the store is opened.
///
/// XXH3 with a secret, not a cryptographic hash, which would take several times as long as all the rest of a write. That is
/// enough, because a fingerprint only says where to look: contents are compared byte by byte, and of contents with equal
/// fingerprints one is found and the others are kept by themselves, so a collision costs whoever has made it a page of RAM
/// and a comparison, whatever he knows.
pub(super) struct Key {
    seed: u64,
    secret: [u8; KEY],
}

impl Key {
    /// A new random key.
    pub(super) fn random() -> Self {
        let (mut seed, mut secret) = ([0; 8], [0; KEY]);
        getrandom::fill(&mut seed)
            .and_then(|()| getrandom::fill(&mut secret))
            .expect("the kernel gives random bytes");
        Self { seed: u64::from_le_bytes(seed), secret }
    }

    /// The fingerprint of a page.
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
