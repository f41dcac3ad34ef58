//! Sealed datagrams: AES-256-GCM under keys that HKDF derives from the cluster's key.
//!
//! ```text
//! version 1 B | session 16 B | number 8 B | sealed: time 8 B, content | tag 16 B
//! ```
//!
//! A session is one [`Sealer`]; its random name salts the key (HKDF, RFC 5869), so that the number
//! is a nonce that never comes twice under one key. The number is big-endian, and the time counts
//! milliseconds since 1970. An [`Opener`] accepts each number of a session once (the window of RFC
//! 4303, section 3.4.3), and no datagram whose time is more than [`SKEW`] from its own.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, MAX_TAG_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Salt};
use ring::rand::{SecureRandom, SystemRandom};

const VERSION: u8 = 1;
const SESSION: usize = 16;
const HEADER: usize = 1 + SESSION + 8;
const TIME: usize = 8;

/// The bytes that sealing adds.
pub(crate) const OVERHEAD: usize = HEADER + TIME + MAX_TAG_LEN;

/// How far the clocks of two hosts may be apart.
const SKEW: Duration = Duration::from_secs(300);

/// The most sessions that an opener remembers. It forgets those first whose last datagram is the
/// oldest.
const SESSIONS: usize = 4096;

/// The cluster's key: each host has it, and nobody else.
#[derive(Clone)]
pub struct Key([u8; 32]);

impl fmt::Debug for Key {
    /// Shows nothing of the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

/// The reason why a datagram is not from a host of the cluster, or not of now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum SealError {
    /// Not sealed, or with another key.
    #[error("the datagram was not made with this cluster's key")]
    Foreign,
    /// The same datagram came before.
    #[error("the datagram is a repetition")]
    Repeated,
    /// The sender's clock differs from this host's.
    #[error("the clocks of its sender and of this host are more than {} s apart", SKEW.as_secs())]
    Skewed,
}

impl Key {
    /// Makes a new key.
    ///
    /// # Errors
    /// If the kernel gives no random bytes.
    pub fn random() -> Result<Self, ring::error::Unspecified> {
        let mut key = [0; 32];
        SystemRandom::new().fill(&mut key)?;
        Ok(Self(key))
    }

    /// Returns the key as 64 hexadecimal digits.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Reads 64 hexadecimal digits; `None` for another text.
    pub fn from_hex(text: &str) -> Option<Self> {
        let text = text.trim();
        if text.len() != 64 || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        let mut key = [0; 32];
        for (byte, digits) in key.iter_mut().zip(text.as_bytes().chunks(2)) {
            *byte = u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()?;
        }
        Some(Self(key))
    }

    fn of_session(&self, session: [u8; SESSION]) -> LessSafeKey {
        let prk = Salt::new(HKDF_SHA256, &session).extract(&self.0);
        let okm = prk.expand(&[b"aquifer gossip"], &AES_256_GCM);
        LessSafeKey::new(UnboundKey::from(okm.expect("one block is never too long")))
    }
}

/// Seals the datagrams of one process.
#[derive(Debug)]
pub struct Sealer {
    key: LessSafeKey,
    session: [u8; SESSION],
    number: u64,
}

impl Sealer {
    /// Begins a session with this random name.
    pub fn new(key: &Key, session: u128) -> Self {
        let session = session.to_be_bytes();
        Self { key: key.of_session(session), session, number: 0 }
    }

    /// Seals a content at `time`, the time since 1970.
    pub fn seal(&mut self, content: &[u8], time: Duration) -> Vec<u8> {
        self.number += 1;
        let mut datagram = Vec::with_capacity(content.len() + OVERHEAD);
        datagram.push(VERSION);
        datagram.extend(self.session);
        datagram.extend(self.number.to_be_bytes());
        let header = Aad::from(datagram.clone());
        datagram.extend(millis(time).to_be_bytes());
        datagram.extend(content);
        let tag = self
            .key
            .seal_in_place_separate_tag(nonce(self.number), header, &mut datagram[HEADER..])
            .expect("a datagram is shorter than the cipher's limit");
        datagram.extend(tag.as_ref());
        datagram
    }
}

/// Opens the datagrams of all hosts.
#[derive(Debug)]
pub struct Opener {
    key: Key,
    sessions: HashMap<[u8; SESSION], Session>,
}

#[derive(Debug)]
struct Session {
    key: LessSafeKey,
    /// The largest number, and as bits which of the 128 before it came.
    highest: u64,
    came: u128,
    last: Duration,
}

/// The content of a datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opened(pub Vec<u8>);

impl Opener {
    /// Opens datagrams sealed with this key.
    pub fn new(key: Key) -> Self {
        Self { key, sessions: HashMap::new() }
    }

    /// Opens a datagram that came at `now`, the time since 1970.
    ///
    /// # Errors
    /// If it is not from a host of the cluster, came before, or is old.
    pub fn open(&mut self, datagram: &[u8], now: Duration) -> Result<Opened, SealError> {
        let (header, sealed) = datagram.split_at_checked(HEADER).ok_or(SealError::Foreign)?;
        let (&version, rest) = header.split_first().ok_or(SealError::Foreign)?;
        let (session, number) = rest.split_at(SESSION);
        let session: [u8; SESSION] = session.try_into().map_err(|_| SealError::Foreign)?;
        let number = number.try_into().map(u64::from_be_bytes).map_err(|_| SealError::Foreign)?;
        if version != VERSION {
            return Err(SealError::Foreign);
        }
        let new_key = (!self.sessions.contains_key(&session)).then(|| self.key.of_session(session));
        let known = self.sessions.get_mut(&session);
        let Some(key) = new_key.as_ref().or(known.as_ref().map(|known| &known.key)) else {
            return Err(SealError::Foreign);
        };
        let mut content = sealed.to_vec();
        let plain = key
            .open_in_place(nonce(number), Aad::from(header), &mut content)
            .map_err(|_| SealError::Foreign)?;
        let (time, plain) = plain.split_first_chunk::<TIME>().ok_or(SealError::Foreign)?;
        if millis(now).abs_diff(u64::from_be_bytes(*time)) > millis(SKEW) {
            return Err(SealError::Skewed);
        }
        let plain = Opened(plain.to_vec());
        match (new_key, known) {
            (Some(key), _) => {
                self.make_room();
                self.sessions.insert(session, Session { key, highest: number, came: 0, last: now });
            }
            (None, Some(known)) => known.note(number, now)?,
            (None, None) => return Err(SealError::Foreign),
        }
        Ok(plain)
    }

    fn make_room(&mut self) {
        if self.sessions.len() < SESSIONS {
            return;
        }
        let oldest = self.sessions.iter().min_by_key(|(_, session)| session.last);
        if let Some(oldest) = oldest.map(|(name, _)| *name) {
            self.sessions.remove(&oldest);
        }
    }
}

impl Session {
    fn note(&mut self, number: u64, now: Duration) -> Result<(), SealError> {
        if number > self.highest {
            let ahead = u32::try_from(number - self.highest).unwrap_or(u32::MAX);
            // Bit 0 stands for the number before the highest.
            let shifted = self.came.checked_shl(ahead).unwrap_or(0);
            let before = 1_u128.checked_shl(ahead - 1).unwrap_or(0);
            (self.came, self.highest) = (shifted | before, number);
        } else {
            let behind = self.highest - number;
            let bit = behind.checked_sub(1).and_then(|bit| u32::try_from(bit).ok());
            let bit = bit.and_then(|bit| 1_u128.checked_shl(bit)).ok_or(SealError::Repeated)?;
            if self.came & bit != 0 {
                return Err(SealError::Repeated);
            }
            self.came |= bit;
        }
        self.last = now;
        Ok(())
    }
}

fn nonce(number: u64) -> Nonce {
    let mut nonce = [0; 12];
    nonce[4..].copy_from_slice(&number.to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1_800_000_000);

    fn pair() -> (Sealer, Opener) {
        let key = Key::from_hex(&"5a".repeat(32)).unwrap();
        (Sealer::new(&key, 7), Opener::new(key))
    }

    #[test]
    fn a_datagram_is_opened_once() {
        let (mut sealer, mut opener) = pair();
        let first = sealer.seal(b"first", NOW);
        assert_eq!(first.len(), 5 + OVERHEAD);
        assert_eq!(opener.open(&first, NOW), Ok(Opened(b"first".to_vec())));
        assert_eq!(opener.open(&first, NOW), Err(SealError::Repeated));
        let later: Vec<_> = (0..200_u8).map(|n| sealer.seal(&[n], NOW)).collect();
        // The window has the 128 numbers before the highest.
        for (n, comes) in [(199, true), (70, false), (71, true), (198, true), (71, false)] {
            let opened = opener.open(&later[n], NOW);
            let content = u8::try_from(n).unwrap();
            let expected = if comes { Ok(Opened(vec![content])) } else { Err(SealError::Repeated) };
            assert_eq!(opened, expected, "{n}");
        }
    }

    #[test]
    fn each_changed_byte_is_noticed() {
        let (mut sealer, mut opener) = pair();
        let good = sealer.seal(b"content", NOW);
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert_eq!(opener.open(&bad, NOW), Err(SealError::Foreign), "byte {at}");
            assert_eq!(opener.open(&good[..at], NOW), Err(SealError::Foreign), "{at} bytes");
        }
        assert!(opener.sessions.is_empty(), "a stranger takes no memory");
        opener.open(&good, NOW).unwrap();
    }

    #[test]
    fn another_key_opens_nothing() {
        let (mut sealer, _) = pair();
        let mut opener = Opener::new(Key::random().unwrap());
        assert_eq!(opener.open(&sealer.seal(b"x", NOW), NOW), Err(SealError::Foreign));
    }

    #[test]
    fn an_old_datagram_is_refused_by_a_process_that_never_saw_it() {
        let (mut sealer, mut opener) = pair();
        let old = sealer.seal(b"x", NOW);
        assert_eq!(opener.open(&old, NOW + SKEW * 2), Err(SealError::Skewed));
        assert_eq!(opener.open(&old, NOW - SKEW * 2), Err(SealError::Skewed));
        opener.open(&old, NOW + SKEW).unwrap();
    }

    #[test]
    fn memory_for_sessions_is_bounded() {
        let key = Key::random().unwrap();
        let mut opener = Opener::new(key.clone());
        for session in 0..SESSIONS + 10 {
            let datagram = Sealer::new(&key, session as u128).seal(b"x", NOW);
            opener.open(&datagram, NOW + Duration::from_millis(session as u64)).unwrap();
        }
        assert_eq!(opener.sessions.len(), SESSIONS);
        assert!(!opener.sessions.contains_key(&0_u128.to_be_bytes()), "the oldest went");
    }

    #[test]
    fn a_key_is_read_as_it_was_written() {
        let key = Key::random().unwrap();
        let read = Key::from_hex(&format!("{}\n", key.to_hex())).unwrap();
        assert_eq!(read.to_hex(), key.to_hex());
        assert!(Key::from_hex("5a").is_none() && Key::from_hex(&"zz".repeat(32)).is_none());
        assert_eq!(format!("{key:?}"), "Key");
    }
}
