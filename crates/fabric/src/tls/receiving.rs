//! What has arrived of a stream of records, and opening it.

use std::ops::Range;

use rustls::AlertDescription;

use super::keys::{HEADER, MAX_CIPHERTEXT, MAX_PLAINTEXT, RecordKey, content};

/// A record of the largest size, whole.
const MAX_RECORD: usize = HEADER + MAX_CIPHERTEXT;
/// What one receive can take: a batch of 32 pages and their headers with room to spare.
const INBOX: usize = 16 * MAX_RECORD;

/// What has arrived: `plain`, opened and not yet handed out, is always before `sealed`.
pub(super) struct Receiving {
    pub(super) key: RecordKey,
    pub(super) buffer: Box<[u8]>,
    pub(super) plain: Range<usize>,
    pub(super) sealed: Range<usize>,
    pub(super) closed: bool,
}

/// Why a connection ends: what the peer is told, and what the caller is.
pub(super) struct Violation(pub(super) AlertDescription, pub(super) String);

impl Receiving {
    pub(super) fn new(key: RecordKey) -> Self {
        let buffer = vec![0; INBOX].into_boxed_slice();
        Self { key, buffer, plain: 0..0, sealed: 0..0, closed: false }
    }

    /// Takes the next record off `sealed`, if it is there whole.
    pub(super) fn next_record(&mut self) -> Result<Option<Range<usize>>, Violation> {
        let arrived = &self.buffer[self.sealed.clone()];
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
        let start = self.sealed.start;
        self.sealed.start += HEADER + length;
        Ok(Some(start..self.sealed.start))
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

    /// Section 6: a farewell ends the stream; anything else, but for one that only announces the farewell, is fatal.
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

    /// Hands out opened bytes; returns how many.
    pub(super) fn take_plain(&mut self, into: &mut [u8]) -> usize {
        let count = into.len().min(self.plain.len());
        into[..count].copy_from_slice(&self.buffer[self.plain.start..self.plain.start + count]);
        self.plain.start += count;
        count
    }

    /// Where the next bytes from the socket go: room for one more record at least.
    pub(super) fn spare(&mut self) -> &mut [u8] {
        if self.sealed.is_empty() {
            self.sealed = 0..0;
        } else if self.buffer.len() - self.sealed.start < MAX_RECORD {
            self.buffer.copy_within(self.sealed.clone(), 0);
            self.sealed = 0..self.sealed.len();
        }
        &mut self.buffer[self.sealed.end..]
    }
}

pub(super) fn unexpected(what: &str) -> Violation {
    Violation(AlertDescription::UnexpectedMessage, format!("the peer sent {what}"))
}
