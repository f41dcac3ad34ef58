//! Received records of a stream, and their decryption.

use std::ops::Range;

use rustls::AlertDescription;

use super::keys::{HEADER, MAX_CIPHERTEXT, MAX_PLAINTEXT, RecordKey, content};

/// Bytes of a record of the largest size.
const MAX_RECORD: usize = HEADER + MAX_CIPHERTEXT;
/// Bytes that one receive can take: a batch of 32 pages with their headers, with space to spare.
const INBOX: usize = 16 * MAX_RECORD;

/// Received bytes: `plain`, decrypted and not yet handed out, always precedes `encrypted`.
pub(super) struct Receiving {
    pub(super) key: RecordKey,
    pub(super) buffer: Box<[u8]>,
    pub(super) plain: Range<usize>,
    pub(super) encrypted: Range<usize>,
    pub(super) closed: bool,
}

/// The reason why a connection ends: the alert for the peer, and the text for the caller.
pub(super) struct Violation(pub(super) AlertDescription, pub(super) String);

impl Receiving {
    pub(super) fn new(key: RecordKey) -> Self {
        let buffer = vec![0; INBOX].into_boxed_slice();
        Self { key, buffer, plain: 0..0, encrypted: 0..0, closed: false }
    }

    /// Takes the next record off `encrypted` if it has arrived whole.
    pub(super) fn next_record(&mut self) -> Result<Option<Range<usize>>, Violation> {
        let arrived = &self.buffer[self.encrypted.clone()];
        let Some(&[kind, _, _, high, low]) = arrived.first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let length = usize::from(u16::from_be_bytes([high, low]));
        if kind != content::APPLICATION_DATA {
            return Err(unexpected("a record that is not encrypted"));
        }
        if length > MAX_CIPHERTEXT {
            return Err(Violation(
                AlertDescription::RecordOverflow,
                "the peer sent a record that is too long".into(),
            ));
        }
        if arrived.len() < HEADER + length {
            return Ok(None);
        }
        let start = self.encrypted.start;
        self.encrypted.start += HEADER + length;
        Ok(Some(start..self.encrypted.start))
    }

    pub(super) fn open(&mut self, record: Range<usize>) -> Result<(usize, u8), Violation> {
        let (length, content) = self.key.open(&mut self.buffer[record]).ok_or_else(|| {
            Violation(
                AlertDescription::BadRecordMac,
                "a record of the peer was damaged or forged".into(),
            )
        })?;
        if length > MAX_PLAINTEXT {
            return Err(Violation(
                AlertDescription::RecordOverflow,
                "the peer sent a record that is too long".into(),
            ));
        }
        Ok((length, content))
    }

    /// Handles an alert (RFC 8446 section 6).
    ///
    /// `close_notify` ends the stream and `user_canceled` only precedes it; every other alert is
    /// fatal.
    pub(super) fn alert(&mut self, inner: Range<usize>) -> Result<(), Violation> {
        let &[_, description] = &self.buffer[inner] else {
            return Err(unexpected("a malformed alert"));
        };
        match AlertDescription::from(description) {
            AlertDescription::CloseNotify => self.closed = true,
            AlertDescription::UserCanceled => {}
            other => {
                return Err(Violation(
                    AlertDescription::CloseNotify,
                    format!("the peer ended the connection: {other:?}"),
                ));
            }
        }
        Ok(())
    }

    /// Copies decrypted bytes out; returns how many.
    pub(super) fn take_plain(&mut self, into: &mut [u8]) -> usize {
        let count = into.len().min(self.plain.len());
        into[..count].copy_from_slice(&self.buffer[self.plain.start..self.plain.start + count]);
        self.plain.start += count;
        count
    }

    /// Returns the space for the next bytes from the socket: enough to complete the first record of
    /// `encrypted`.
    pub(super) fn spare(&mut self) -> &mut [u8] {
        if self.encrypted.is_empty() {
            self.encrypted = 0..0;
        } else if self.buffer.len() - self.encrypted.start < MAX_RECORD {
            self.buffer.copy_within(self.encrypted.clone(), 0);
            self.encrypted = 0..self.encrypted.len();
        }
        &mut self.buffer[self.encrypted.end..]
    }
}

pub(super) fn unexpected(what: &str) -> Violation {
    Violation(AlertDescription::UnexpectedMessage, format!("the peer sent {what}"))
}
