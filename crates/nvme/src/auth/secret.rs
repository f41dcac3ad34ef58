//! Secrets of hosts and controllers.

use std::str::FromStr;
use std::{fmt, io};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ring::rand::{SecureRandom as _, SystemRandom};

use super::Hash;
use crate::proto::Nqn;

/// A secret in the form `DHHC-1:HH:BASE64:` of `nvme gen-dhchap-key` (Base, section 8.13.5, "Secret
/// representation").
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    key: Vec<u8>,
    /// The hash that binds the key to its owner's name; `None` leaves it unbound.
    transform: Option<Hash>,
}

/// The reason why a text is not a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this is not a secret: {0}; create one with 'nvme gen-dhchap-key' (like DHHC-1:00:...:)")]
pub struct SecretError(pub(super) &'static str);

impl Secret {
    /// Returns the text of a new secret: 32 random bytes, not bound to a name.
    ///
    /// # Errors
    /// If the system gives no random bytes.
    pub fn generate() -> io::Result<String> {
        let mut key = [0; 32];
        SystemRandom::new()
            .fill(&mut key)
            .map_err(|_| io::Error::other("the system gives no random bytes"))?;
        let bytes = [&key[..], &crc32(&key).to_le_bytes()].concat();
        Ok(format!("DHHC-1:00:{}:", STANDARD.encode(bytes)))
    }

    /// Returns the key as `owner`, a host or a subsystem, uses it.
    pub(super) fn for_owner(&self, owner: &Nqn) -> Vec<u8> {
        match self.transform {
            None => self.key.clone(),
            Some(hash) => hash.hmac(&self.key, format!("{owner}NVMe-over-Fabrics").as_bytes()),
        }
    }
}

impl fmt::Debug for Secret {
    /// Leaves the key out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secret").field("transform", &self.transform).finish_non_exhaustive()
    }
}

impl FromStr for Secret {
    type Err = SecretError;

    fn from_str(text: &str) -> Result<Self, SecretError> {
        let rest = text
            .trim()
            .strip_prefix("DHHC-1:")
            .ok_or(SecretError("it does not start with DHHC-1:"))?;
        let (transform, rest) = rest.split_once(':').ok_or(SecretError("it ends too early"))?;
        let transform = match transform {
            "00" => None,
            "01" => Some(Hash::Sha256),
            "02" => Some(Hash::Sha384),
            "03" => Some(Hash::Sha512),
            _ => return Err(SecretError("its hash is not one of 00, 01, 02 and 03")),
        };
        let encoded = rest.strip_suffix(':').unwrap_or(rest);
        let bytes = STANDARD.decode(encoded).map_err(|_| SecretError("its key is not BASE64"))?;
        let (key, check) =
            bytes.split_last_chunk::<4>().ok_or(SecretError("its key is too short"))?;
        if !matches!(key.len(), 32 | 48 | 64) {
            return Err(SecretError("its key does not have 32, 48 or 64 bytes"));
        }
        if crc32(key) != u32::from_le_bytes(*check) {
            return Err(SecretError("its checksum is wrong: it is mistyped or cut off"));
        }
        Ok(Self { key: key.to_vec(), transform })
    }
}

/// Computes Ethernet's CRC-32 (IEEE 802.3). Keys are short and rare, so one bit a step is fast
/// enough.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0xEDB8_8320 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc: u32, &byte| (0..8).fold(crc ^ u32::from(byte), step))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Made by `nvme gen-dhchap-key --secret=00..1f`.
    const GOOD: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";

    #[test]
    fn secrets_of_nvme_cli_are_read() {
        let secret: Secret = GOOD.parse().unwrap();
        assert_eq!(secret.key, (0..32).collect::<Vec<u8>>());
        assert_eq!(secret.for_owner(&Nqn::discovery()), secret.key);
        let bound: Secret = GOOD.replacen("00", "01", 1).parse().unwrap();
        assert_ne!(bound.for_owner(&Nqn::discovery()), secret.key);
    }

    #[test]
    fn new_secrets_are_secrets_and_differ() {
        let (one, other) = (Secret::generate().unwrap(), Secret::generate().unwrap());
        assert_ne!(one, other);
        assert_eq!((one.parse::<Secret>().unwrap().key.len(), one.len()), (32, GOOD.len()));
    }

    #[test]
    fn a_malformed_secret_is_refused_with_the_reason() {
        for (text, why) in [
            ("", "does not start"),
            ("DHHC-1:", "ends too early"),
            ("DHHC-1:07:AAAA:", "its hash"),
            ("DHHC-1:00:%%%:", "BASE64"),
            ("DHHC-1:00:AAAA:", "too short"),
            ("DHHC-1:00:AAAAAAAA:", "32, 48 or 64"),
            (&GOOD.replace("AAEC", "AAEB"), "checksum"),
        ] {
            let error = text.parse::<Secret>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
        assert!(!format!("{:?}", GOOD.parse::<Secret>()).contains("31"), "a secret is not told");
    }
}
