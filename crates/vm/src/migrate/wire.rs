//! The connection between a VM's supervisors on two hosts: mutual TLS, one message at a time.

use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use aquifer_page::HostName;
use aquifer_region::handover;
use aquifer_transport::channel::{Channel as _, Socket};
use aquifer_transport::tls::{self, Identity, TlsStream};

use super::message::{Link, Message};

/// Timeout of connecting and of the TLS handshake.
const GREETING: Duration = Duration::from_secs(5);

/// Timeout of a message, including the wait for it: QEMU may load devices, and lenders may be slow.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A connection to the other host's supervisor.
pub(crate) struct Wire {
    stream: TlsStream,
    data: Vec<u8>,
    sent: u64,
}

struct Tls<'a>(&'a mut TlsStream);

impl Read for Tls<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.recv(into)
    }
}

impl Write for Tls<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.0.send_all(&mut [IoSlice::new(data)]).map(|()| data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Wire {
    pub(super) fn connect(
        address: SocketAddr,
        host: &HostName,
        identity: &Path,
    ) -> io::Result<Self> {
        let identity = Identity::load(identity).map_err(io::Error::other)?;
        let socket = Socket::from(TcpStream::connect_timeout(&address, GREETING)?);
        let stream =
            tls::connect(socket, identity.client(), host, GREETING).map_err(io::Error::other)?;
        Self::new(stream)
    }

    /// Accepts the next connection, which must come from `host`.
    pub(super) fn accept(
        listener: &TcpListener,
        host: &HostName,
        identity: &Path,
    ) -> io::Result<Self> {
        let identity = Identity::load(identity).map_err(io::Error::other)?;
        let (socket, _) = listener.accept()?;
        socket.set_nonblocking(false)?;
        let (stream, is) =
            tls::accept(socket.into(), identity.server(), GREETING).map_err(io::Error::other)?;
        if is != *host {
            return Err(io::Error::other(format!("host {is} connected instead of host {host}")));
        }
        Self::new(stream)
    }

    /// Connects and sends `Hello`.
    pub(super) fn greet(link: &Link) -> io::Result<Self> {
        let mut wire = Self::connect(link.address, &link.host, &link.identity)?;
        // The QEMUs' versions were compared on the first connection.
        let (migration, qemu) = (link.migration, String::new());
        let hello = Message::Hello { migration, qemu, runs: true };
        wire.send(&hello, &[]).and_then(|()| wire.done())?;
        Ok(wire)
    }

    /// Accepts the next connection, which must come from the link's host and name its migration.
    pub(super) fn greeted(listener: &TcpListener, link: &Link) -> io::Result<Self> {
        let mut wire = Self::accept(listener, &link.host, &link.identity)?;
        match wire.receive()?.0 {
            Message::Hello { migration, .. } if migration == link.migration => {
                wire.send(&Message::Done, &[]).map(|()| wire)
            }
            other => Err(io::Error::other(format!("unexpected first message: {other:?}"))),
        }
    }

    fn new(stream: TlsStream) -> io::Result<Self> {
        Ok(Self { stream, data: Vec::new(), sent: 0 })
    }

    /// Closes the connection, so that the other side stops waiting.
    pub(super) fn break_off(&self) {
        // A connection that is already broken is closed enough.
        let _ = self.stream.shutdown();
    }

    /// Resets the connection, so that nothing more that the other side sends is received.
    #[cfg(test)]
    pub(super) fn reset(self) {
        let at_once = Some(Duration::ZERO);
        rustix::net::sockopt::set_socket_linger(self.stream.socket(), at_once).expect("a socket");
    }

    /// Returns the bytes sent so far.
    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    pub(super) fn send(&mut self, message: &Message, data: &[u8]) -> io::Result<()> {
        struct Counting<'a>(Tls<'a>, u64);
        impl Write for Counting<'_> {
            fn write(&mut self, data: &[u8]) -> io::Result<usize> {
                self.1 += data.len() as u64;
                self.0.write(data)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        self.stream.set_deadline(Some(Instant::now() + TIMEOUT));
        let mut to = Counting(Tls(&mut self.stream), 0);
        let sent = handover::send(&mut to, message, data);
        self.sent += to.1;
        sent
    }

    /// Waits for the next message and its data. A closed connection is an error.
    pub(super) fn receive(&mut self) -> io::Result<(Message, &[u8])> {
        self.stream.set_deadline(Some(Instant::now() + TIMEOUT));
        let message =
            handover::receive(&mut Tls(&mut self.stream), &mut self.data).map_err(|error| {
                match error.kind() {
                    io::ErrorKind::WouldBlock => io::Error::new(
                        io::ErrorKind::TimedOut,
                        format!("no message arrived within {} s", TIMEOUT.as_secs()),
                    ),
                    _ => error,
                }
            })?;
        let closed =
            || io::Error::new(io::ErrorKind::UnexpectedEof, "the other host closed the connection");
        Ok((message.ok_or_else(closed)?, &self.data))
    }

    /// Waits until the other side confirms with `Done`.
    pub(super) fn done(&mut self) -> io::Result<()> {
        match self.receive()?.0 {
            Message::Done => Ok(()),
            Message::Failed(why) => Err(io::Error::other(why)),
            other => Err(io::Error::other(format!("unexpected answer: {other:?}"))),
        }
    }
}
