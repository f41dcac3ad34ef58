//! A token: what a host needs to join.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aquifer_page::HostName;
use aquifer_transport::tls::Fingerprint;
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use ring::hmac;
use ring::rand::{SecureRandom as _, SystemRandom};
use serde::{Deserialize, Serialize};

use super::{ClusterDir, ClusterError, TOKENS};

/// A token proves the cluster to a host by the authority's fingerprint, and the host to the cluster
/// by a secret. Any number of hosts may use it until its end.
///
/// As text it is Base64 (RFC 4648, section 5) of 64 bytes: id 8, secret 16, end 8 (seconds since
/// 1970, big-endian), fingerprint 32.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    id: [u8; 8],
    secret: [u8; 16],
    ends: u64,
    authority: Fingerprint,
}

impl fmt::Debug for Token {
    /// Shows nothing of the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token").field("id", &self.id()).field("ends", &self.ends).finish()
    }
}

/// The reason why a text is no token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this is not a token: a token has 86 letters, digits, '-' and '_'")]
pub struct TokenError;

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ends = self.ends.to_be_bytes();
        let bytes = [&self.id[..], &self.secret, &ends, &self.authority].concat();
        f.write_str(&BASE64_URL_SAFE_NO_PAD.encode(bytes))
    }
}

impl FromStr for Token {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(text.trim()).map_err(|_| TokenError)?;
        let (id, rest) = bytes.split_first_chunk().ok_or(TokenError)?;
        let (secret, rest) = rest.split_first_chunk().ok_or(TokenError)?;
        let (ends, rest) = rest.split_first_chunk().ok_or(TokenError)?;
        let authority = rest.try_into().map_err(|_| TokenError)?;
        Ok(Self { id: *id, secret: *secret, ends: u64::from_be_bytes(*ends), authority })
    }
}

impl Token {
    /// Returns the token's id, 16 hexadecimal digits, which is no secret.
    pub fn id(&self) -> String {
        hex(&self.id)
    }

    /// Returns the fingerprint of the cluster's authority.
    pub fn authority(&self) -> Fingerprint {
        self.authority
    }

    /// Returns the time that is left until the token's end; `None` if it has ended.
    pub fn left(&self, now: SystemTime) -> Option<Duration> {
        let left = self.ends.checked_sub(seconds(now)).filter(|left| *left > 0);
        left.map(Duration::from_secs)
    }

    /// Returns the proof that the host knows the secret, for this request alone: HMAC-SHA-256 (RFC
    /// 2104) of host, address and request, as hexadecimal digits.
    pub fn proof(&self, host: &str, address: &str, request: &[u8]) -> String {
        hex(hmac::sign(&key(&self.secret), &claim(host, address, request)).as_ref())
    }
}

/// A token as its signer keeps it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Kept {
    id: String,
    secret: String,
    ends: u64,
    /// The hosts that joined with it, and so know it. `None` if the token is from before signers
    /// noted that: any host may know it.
    #[serde(default)]
    known_to: Option<BTreeSet<HostName>>,
}

/// The reason why a signer refuses a proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    Unknown,
    Ended,
}

impl ClusterDir {
    /// Makes a token that ends after `life`.
    ///
    /// # Errors
    /// If this host is no signer, or the token cannot be kept.
    pub fn new_token(&self, life: Duration) -> Result<Token, ClusterError> {
        let authority = self.fingerprint()?;
        let (mut id, mut secret) = ([0; 8], [0; 16]);
        let random = SystemRandom::new();
        let filled = random.fill(&mut id).and_then(|()| random.fill(&mut secret));
        filled.map_err(|_| ClusterError::Random)?;
        let now = seconds(SystemTime::now());
        let token = Token { id, secret, ends: now.saturating_add(life.as_secs()), authority };
        let mut kept: Vec<Kept> = self.read(TOKENS)?;
        kept.retain(|kept| kept.ends > now);
        kept.push(Kept {
            id: token.id(),
            secret: hex(&secret),
            ends: token.ends,
            known_to: Some(BTreeSet::new()),
        });
        self.write_json(TOKENS, &kept)?;
        Ok(token)
    }

    /// Notes that a host knows a token. The caller [locks](Self::lock) the directory.
    pub(super) fn note_token(&self, id: &str, host: &HostName) -> Result<(), ClusterError> {
        let mut kept: Vec<Kept> = self.read(TOKENS)?;
        let its = kept.iter_mut().filter(|kept| kept.id == id);
        let mut known = its.filter_map(|kept| kept.known_to.as_mut());
        match known.any(|known| known.insert(host.clone())) {
            true => self.write_json(TOKENS, &kept),
            false => Ok(()),
        }
    }

    /// Ends the tokens that a host knows or may know. The caller [locks](Self::lock) the directory.
    pub(super) fn end_tokens(&self, host: &HostName) -> Result<(), ClusterError> {
        let mut kept: Vec<Kept> = self.read(TOKENS)?;
        let before = kept.len();
        kept.retain(|kept| kept.known_to.as_ref().is_some_and(|known| !known.contains(host)));
        if kept.len() < before { self.write_json(TOKENS, &kept) } else { Ok(()) }
    }

    /// Checks a proof. A wrong proof and an unknown token look alike.
    pub(super) fn check_proof(
        &self,
        id: &str,
        claimed: (&str, &str, &[u8]),
        proof: &str,
        now: SystemTime,
    ) -> Result<Result<(), Refusal>, ClusterError> {
        let tokens: Vec<Kept> = self.read(TOKENS)?;
        let Some(kept) = tokens.into_iter().find(|kept| kept.id == id) else {
            return Ok(Err(Refusal::Unknown));
        };
        let (host, address, request) = claimed;
        let (Some(secret), Some(proof)) = (unhex(&kept.secret), unhex(proof)) else {
            return Ok(Err(Refusal::Unknown));
        };
        if hmac::verify(&key(&secret), &claim(host, address, request), &proof).is_err() {
            return Ok(Err(Refusal::Unknown));
        }
        Ok(if kept.ends > seconds(now) { Ok(()) } else { Err(Refusal::Ended) })
    }
}

fn key(secret: &[u8]) -> hmac::Key {
    hmac::Key::new(hmac::HMAC_SHA256, secret)
}

/// The bytes that a proof is of. Neither a name nor an address has a zero byte.
fn claim(host: &str, address: &str, request: &[u8]) -> Vec<u8> {
    [b"aquifer join\0", host.as_bytes(), b"\0", address.as_bytes(), b"\0", request].concat()
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes().chunks(2);
    let byte = |digits| u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok();
    text.len().is_multiple_of(2).then(|| digits.map(byte).collect()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster() -> (tempfile::TempDir, ClusterDir) {
        let dir = tempfile::tempdir().unwrap();
        let cluster = ClusterDir::new(dir.path());
        cluster.create("test").unwrap();
        (dir, cluster)
    }

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn a_token_is_read_as_it_was_written() {
        let (_dir, cluster) = cluster();
        let token = cluster.new_token(HOUR).unwrap();
        let text = token.to_string();
        assert_eq!(text.len(), 86);
        assert_eq!(text.parse::<Token>().unwrap(), token);
        assert_eq!(token.authority(), cluster.fingerprint().unwrap());
        for bad in ["", "x", &text[1..], &format!("{text}x")] {
            assert_eq!(bad.parse::<Token>(), Err(TokenError), "{bad}");
        }
        assert!(!format!("{token:?}").contains(&hex(&token.secret)));
    }

    #[test]
    fn the_tokens_that_a_host_knows_end_with_it() {
        let (_dir, cluster) = cluster();
        let tokens = [(); 3].map(|()| cluster.new_token(HOUR).unwrap());
        let hosts: [HostName; 2] = ["b", "c"].map(|name| name.parse().unwrap());
        cluster.note_token(&tokens[0].id(), &hosts[0]).unwrap();
        for host in &hosts {
            cluster.note_token(&tokens[1].id(), host).unwrap();
            cluster.note_token(&tokens[1].id(), host).unwrap();
        }
        cluster.end_tokens(&hosts[1]).unwrap();
        let is_good = |token: &Token| {
            let proof = token.proof("d", "192.0.2.1:7070", b"request");
            let claimed = ("d", "192.0.2.1:7070", b"request".as_slice());
            cluster.check_proof(&token.id(), claimed, &proof, SystemTime::now()).unwrap().is_ok()
        };
        assert_eq!(tokens.each_ref().map(is_good), [true, false, true]);

        // From before signers noted which hosts use a token: it may be any.
        let mut kept: serde_json::Value = cluster.read(TOKENS).unwrap();
        for token in kept.as_array_mut().unwrap() {
            token.as_object_mut().unwrap().remove("known_to").unwrap();
        }
        cluster.write_json(TOKENS, &kept).unwrap();
        cluster.note_token(&tokens[0].id(), &hosts[0]).unwrap();
        assert!(is_good(&tokens[0]) && is_good(&tokens[2]));
        let new = cluster.new_token(HOUR).unwrap();
        cluster.end_tokens(&hosts[1]).unwrap();
        assert_eq!(tokens.each_ref().map(is_good), [false; 3]);
        assert!(is_good(&new));
    }

    #[test]
    fn only_a_whole_and_timely_proof_is_accepted() {
        let (_dir, cluster) = cluster();
        let (now, tokens) = (SystemTime::now(), [(); 2].map(|()| cluster.new_token(HOUR).unwrap()));
        let [token, other] = &tokens;
        let proof = token.proof("b", "192.0.2.1:7070", b"request");
        let check = |id: &str, host, address, request: &[u8], proof: &str, now| {
            cluster.check_proof(id, (host, address, request), proof, now).unwrap()
        };
        let id = token.id();
        let good = ("b", "192.0.2.1:7070", b"request".as_slice());
        assert_eq!(check(&id, good.0, good.1, good.2, &proof, now), Ok(()));
        let unknown = Err(Refusal::Unknown);
        assert_eq!(check(&other.id(), good.0, good.1, good.2, &proof, now), unknown);
        assert_eq!(check(&id, "c", good.1, good.2, &proof, now), unknown);
        assert_eq!(check(&id, good.0, "192.0.2.9:7070", good.2, &proof, now), unknown);
        assert_eq!(check(&id, good.0, good.1, b"another", &proof, now), unknown);
        assert_eq!(check(&id, good.0, good.1, good.2, &proof[..62], now), unknown);
        assert_eq!(check(&id, good.0, good.1, good.2, "no proof", now), unknown);
        assert_eq!(check("", good.0, good.1, good.2, &proof, now), unknown);
        let late = now + 2 * HOUR;
        assert_eq!(check(&id, good.0, good.1, good.2, &proof, late), Err(Refusal::Ended));
        assert_eq!((token.left(late), token.left(now).is_some()), (None, true));
    }
}
