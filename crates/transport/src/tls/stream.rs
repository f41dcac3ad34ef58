//! The record layer of an established connection (RFC 8446 section 5), in preallocated buffers.

use std::fmt;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::time::{Duration, Instant};

use rustls::client::ClientConnectionData;
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use rustls::{AlertDescription, ConnectionTrafficSecrets, ExtractedSecrets, SupportedCipherSuite};

use super::TlsError;
use super::keys::{HEADER, RecordKey, content};
use super::receiving::{Receiving, Violation, unexpected};
use super::sending::Sending;
use crate::channel::{Channel, Socket};

/// Messages that may follow the handshake (RFC 8446 section 4.6).
const NEW_SESSION_TICKET: u8 = 4;
const KEY_UPDATE: u8 = 24;
/// The level of an alert that ends a connection (RFC 8446 section 6).
const FATAL: u8 = 2;

/// The source of updated keys; its two kinds differ in type only.
pub(super) enum Kernel {
    Client(KernelConnection<ClientConnectionData>),
    Server(KernelConnection<ServerConnectionData>),
}

impl Kernel {
    fn next_send(&mut self) -> Result<(u64, ConnectionTrafficSecrets), rustls::Error> {
        match self {
            Self::Client(kernel) => kernel.update_tx_secret(),
            Self::Server(kernel) => kernel.update_tx_secret(),
        }
    }

    fn next_receive(&mut self) -> Result<(u64, ConnectionTrafficSecrets), rustls::Error> {
        match self {
            Self::Client(kernel) => kernel.update_rx_secret(),
            Self::Server(kernel) => kernel.update_rx_secret(),
        }
    }

    fn suite(&self) -> SupportedCipherSuite {
        match self {
            Self::Client(kernel) => kernel.negotiated_cipher_suite(),
            Self::Server(kernel) => kernel.negotiated_cipher_suite(),
        }
    }
}

/// A TLS 1.3 connection after the handshake.
///
/// One `recv` takes all records that have arrived, one send as many as fit a buffer of 128 KiB;
/// neither allocates. The stream updates its sending key when the peer asks, and before the key
/// wears out (RFC 8446 section 5.5).
///
/// Any error ends the connection, except a timeout while waiting for the first byte.
pub struct TlsStream {
    socket: Socket,
    kernel: Kernel,
    receiving: Receiving,
    sending: Sending,
    broken: bool,
}

impl fmt::Debug for TlsStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsStream").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl TlsStream {
    pub(super) fn new(
        socket: Socket,
        secrets: ExtractedSecrets,
        kernel: Kernel,
    ) -> Result<Self, TlsError> {
        let unknown = || rustls::Error::General("the agreed cipher is not supported".into());
        let suite = kernel.suite().tls13().ok_or_else(unknown)?;
        let receiving = Receiving::new(RecordKey::new(secrets.rx).ok_or_else(unknown)?);
        let key = RecordKey::new(secrets.tx).ok_or_else(unknown)?;
        let sending = Sending::new(key, suite.common.confidentiality_limit);
        Ok(Self { socket, kernel, receiving, sending, broken: false })
    }

    /// Updates the sending key after `records` records, if the cipher does not demand it earlier.
    ///
    /// Values below two count as two, as the update itself takes one record.
    pub fn renew_key_after(&mut self, records: u64) {
        self.sending.key_life = self.sending.key_life.min(records.max(2));
    }

    /// Returns the socket below, so that another thread can shut the connection down.
    pub fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Decrypts the next record with data, if it has arrived whole; returns whether there is one.
    ///
    /// It handles alerts and handshake messages on the way.
    fn open_next(&mut self) -> Result<bool, Violation> {
        while let Some(record) = self.receiving.next_record()? {
            let (length, content) = self.receiving.open(record.clone())?;
            let inner = record.start + HEADER..record.start + HEADER + length;
            match content {
                content::APPLICATION_DATA if length > 0 => {
                    self.receiving.plain = inner;
                    return Ok(true);
                }
                content::APPLICATION_DATA => {}
                content::ALERT => {
                    self.receiving.alert(inner)?;
                    if self.receiving.closed {
                        return Ok(false);
                    }
                }
                content::HANDSHAKE => self.handshake_message(inner)?,
                _ => return Err(unexpected("a record of unknown content")),
            }
        }
        Ok(false)
    }

    /// Handles session tickets, which it ignores, and key updates (RFC 8446 section 4.6).
    ///
    /// This end never offers post-handshake authentication. A CertificateRequest therefore ends the
    /// connection with a fatal `unexpected_message` (RFC 8446 section 4.6.2).
    fn handshake_message(&mut self, message: Range<usize>) -> Result<(), Violation> {
        let mut rest = &self.receiving.buffer[message];
        while let Some((head, after)) = rest.split_at_checked(4) {
            let length = u32::from_be_bytes([0, head[1], head[2], head[3]]) as usize;
            let Some((body, after)) = after.split_at_checked(length) else {
                return Err(unexpected("a handshake message in pieces"));
            };
            match (head[0], body) {
                (NEW_SESSION_TICKET, _) if matches!(self.kernel, Kernel::Client(_)) => {}
                // RFC 8446 section 5.1: a message that changes keys is the last of its record.
                (KEY_UPDATE, &[request @ 0..=1]) if after.is_empty() => {
                    self.sending.update_owed |= request == 1;
                    let next = self.kernel.next_receive().ok().and_then(RecordKey::new);
                    self.receiving.key =
                        next.ok_or_else(|| unexpected("a key update that cannot be followed"))?;
                    return Ok(());
                }
                _ => return Err(unexpected("an unexpected handshake message")),
            }
            rest = after;
        }
        if rest.is_empty() { Ok(()) } else { Err(unexpected("a handshake message in pieces")) }
    }

    /// Encrypts as much of `bufs` as the outbox takes; returns how much.
    fn seal_some(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut slices = bufs.iter().map(|slice| &**slice);
        let mut slice: &[u8] = &[];
        let mut total = 0;
        while self.sending.has_room() {
            self.update_key_if_due()?;
            let room = self.sending.plaintext_area();
            let mut filled = 0;
            while filled < room.len() {
                if slice.is_empty() {
                    match slices.next() {
                        Some(next) => slice = next,
                        None => break,
                    }
                    continue;
                }
                let count = slice.len().min(room.len() - filled);
                let (now, later) = slice.split_at(count);
                room[filled..filled + count].copy_from_slice(now);
                filled += count;
                slice = later;
            }
            if filled == 0 {
                break;
            }
            self.sending.seal(filled, content::APPLICATION_DATA);
            total += filled;
        }
        Ok(total)
    }

    /// Queues a key update before data if the peer asked or the key's age demands it.
    ///
    /// See RFC 8446 sections 4.6.3 and 5.5.
    fn update_key_if_due(&mut self) -> io::Result<()> {
        // The update itself is one of the key's records.
        if !self.sending.update_owed && self.sending.key.used() + 1 < self.sending.key_life {
            return Ok(());
        }
        // Requests no update from the peer, which limits the age of its own keys.
        self.sending.plaintext_area()[..5].copy_from_slice(&[KEY_UPDATE, 0, 0, 1, 0]);
        self.sending.seal(5, content::HANDSHAKE);
        let next = self.kernel.next_send().ok().and_then(RecordKey::new);
        self.sending.key =
            next.ok_or_else(|| io::Error::other("TLS: the sending key cannot be renewed"))?;
        self.sending.update_owed = false;
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        let ready = std::mem::take(&mut self.sending.ready);
        if ready.is_empty() {
            return Ok(());
        }
        self.socket
            .send_all(&mut [IoSlice::new(&self.sending.buffer[ready])])
            .inspect_err(|_| self.broken = true)
    }

    /// Sends the bytes that the socket takes at once; returns whether none are left.
    fn try_flush(&mut self) -> io::Result<bool> {
        let sent =
            self.socket.try_send(&[IoSlice::new(&self.sending.buffer[self.sending.ready.clone()])]);
        self.sending.ready.start += sent.inspect_err(|_| self.broken = true)?;
        if self.sending.ready.is_empty() {
            self.sending.ready = 0..0;
        }
        Ok(self.sending.ready.is_empty())
    }

    /// Sends an alert if possible without waiting, and ends the connection (RFC 8446 section 6.2).
    fn fail(&mut self, Violation(alert, why): Violation) -> io::Error {
        self.send_alert(FATAL, alert);
        self.broken = true;
        io::Error::new(io::ErrorKind::InvalidData, format!("TLS: {why}"))
    }

    fn send_alert(&mut self, level: u8, alert: AlertDescription) {
        if !self.broken && self.sending.has_room() {
            self.sending.plaintext_area()[..2].copy_from_slice(&[level, alert.into()]);
            self.sending.seal(2, content::ALERT);
            // The connection ends either way.
            let _ = self.try_flush();
        }
    }

    fn check(&self) -> io::Result<()> {
        if self.broken {
            return Err(io::Error::new(
                io::ErrorKind::NotConnected,
                "TLS: the connection failed before",
            ));
        }
        Ok(())
    }
}

impl Channel for TlsStream {
    fn recv(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.check()?;
        let mut total = 0;
        while total < buf.len() {
            total += self.receiving.take_plain(&mut buf[total..]);
            if !self.receiving.plain.is_empty() || self.receiving.closed {
                break;
            }
            if self.open_next().map_err(|violation| self.fail(violation))? {
                continue;
            }
            if total > 0 || self.receiving.closed {
                break;
            }
            // The peer may be waiting for bytes that `try_send` took and could not send.
            self.flush()?;
            match self.socket.recv(self.receiving.spare()) {
                Ok(0) => {
                    self.broken = true;
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "TLS: the connection broke off",
                    ));
                }
                Ok(received) => self.receiving.encrypted.end += received,
                Err(error) => return Err(error),
            }
        }
        Ok(total)
    }

    fn send_all(&mut self, mut bufs: &mut [IoSlice<'_>]) -> io::Result<()> {
        self.check()?;
        IoSlice::advance_slices(&mut bufs, 0);
        while !bufs.is_empty() {
            if !self.sending.has_room() {
                self.flush()?;
            }
            let encrypted = self.seal_some(bufs).inspect_err(|_| self.broken = true)?;
            IoSlice::advance_slices(&mut bufs, encrypted);
        }
        self.flush()
    }

    fn try_send(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        self.check()?;
        if !self.try_flush()? {
            return Ok(0);
        }
        let encrypted = self.seal_some(bufs).inspect_err(|_| self.broken = true)?;
        // The rest goes out with the next send, or before the next wait for the peer.
        self.try_flush()?;
        Ok(encrypted)
    }

    fn set_deadline(&self, deadline: Option<Instant>) {
        self.socket.set_deadline(deadline);
    }

    fn set_abortive(&self, abortive: bool) -> io::Result<()> {
        self.socket.set_abortive(abortive)
    }

    fn pause(&self, time: Duration) -> io::Result<()> {
        self.socket.pause(time)
    }

    fn shutdown(&self) -> io::Result<()> {
        self.socket.shutdown()
    }
}

impl Drop for TlsStream {
    /// Sends `close_notify` (RFC 8446 section 6.1), so that the peer can tell an end from a cut.
    fn drop(&mut self) {
        self.send_alert(1, AlertDescription::CloseNotify);
    }
}
