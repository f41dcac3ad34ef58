//! The TLS handshake, by rustls; [`TlsStream`] handles the records that follow.

use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_page::HostName;
use rustix::net::Shutdown;
use rustls::CommonState;
use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::pki_types::{DnsName, ServerName};
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{ConnectionState, EncodeError, EncodeTlsData, UnbufferedStatus};

use super::keys::{HEADER, MAX_CIPHERTEXT};
use super::live::Live;
use super::stream::{Kernel, TlsStream};
use super::{Client, Server, TlsError, Validity, host_name};
use crate::channel::{Channel, Socket};

/// The time that a refused client has to read the reason.
const FAREWELL: Duration = Duration::from_secs(1);
/// The most bytes of an incomplete handshake message. Certificates of our authority take less than
/// 1 KiB.
const MAX_PENDING: usize = 1 << 16;

/// Performs the server's handshake on a connected socket, and returns the client's host name.
///
/// The socket has no deadline afterwards.
///
/// # Errors
/// [`TlsError`] if the client does not prove within `timeout` that it is a host of the cluster.
pub fn accept(
    mut socket: Socket,
    server: impl Into<Server>,
    timeout: Duration,
) -> Result<(TlsStream, HostName), TlsError> {
    let Server { config, live } = server.into();
    let deadline = Instant::now() + timeout;
    let mut engine = UnbufferedServerConnection::new(config)?;
    shake_hands(&mut engine, &mut socket, deadline)
        .inspect_err(|_| dismiss(&mut socket, deadline))?;
    let host = peer(&engine)?;
    watch(live, &engine, &socket, &host)?;
    let (secrets, kernel) = engine.dangerous_into_kernel_connection()?;
    Ok((TlsStream::new(socket, secrets, Kernel::Server(kernel))?, host))
}

/// Performs the client's handshake on a connected socket, which has no deadline afterwards.
///
/// In TLS 1.3 the client finishes first: if the server does not trust it, the first `recv` reports
/// that.
///
/// # Errors
/// [`TlsError`] if the server does not prove within `timeout` that it is `host` of this cluster, or
/// if `host` is no DNS name.
pub fn connect(
    mut socket: Socket,
    client: impl Into<Client>,
    host: &HostName,
    timeout: Duration,
) -> Result<TlsStream, TlsError> {
    let Client { config, live } = client.into();
    let name = DnsName::try_from(host.as_str()).map_err(|_| TlsError::Name(host.to_string()))?;
    let mut engine = UnbufferedClientConnection::new(config, ServerName::DnsName(name.to_owned()))?;
    shake_hands(&mut engine, &mut socket, Instant::now() + timeout)?;
    let found = peer(&engine)?;
    // Verification accepts any DNS name of the certificate; only the subject names the host.
    if found != *host {
        return Err(TlsError::Peer(format!("its certificate names host {found}, not {host}")));
    }
    watch(live, &engine, &socket, host)?;
    let (secrets, kernel) = engine.dangerous_into_kernel_connection()?;
    TlsStream::new(socket, secrets, Kernel::Client(kernel))
}

/// Ends the connection as soon as its peer is revoked, in so far as the configuration knows that.
fn watch(
    live: Option<Arc<Live>>,
    connection: &CommonState,
    socket: &Socket,
    peer: &HostName,
) -> Result<(), TlsError> {
    let certificate = connection.peer_certificates().and_then(|chain| chain.first());
    match (live, certificate) {
        (Some(live), Some(certificate)) => live.watch(socket, peer, Validity::of(certificate)?),
        _ => Ok(()),
    }
}

fn peer(connection: &CommonState) -> Result<HostName, TlsError> {
    let chain = connection.peer_certificates().unwrap_or_default();
    host_name(chain.first().ok_or_else(|| TlsError::Peer("it showed no certificate".to_owned()))?)
}

/// The common part of rustls' two kinds of connection, which share no trait.
trait Engine {
    type Data;

    fn process<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data>;
}

impl Engine for UnbufferedClientConnection {
    type Data = ClientConnectionData;

    fn process<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(incoming)
    }
}

impl Engine for UnbufferedServerConnection {
    type Data = ServerConnectionData;

    fn process<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(incoming)
    }
}

/// Received bytes that rustls has not consumed, and encoded bytes that are not sent.
#[derive(Default)]
struct Buffers {
    incoming: Vec<u8>,
    outgoing: Vec<u8>,
}

/// The action that follows a step of the handshake.
enum Next {
    Step,
    Receive,
    Done,
}

fn shake_hands<E: Engine>(
    engine: &mut E,
    socket: &mut Socket,
    deadline: Instant,
) -> Result<(), TlsError> {
    let mut buffers = Buffers::default();
    socket.set_deadline(Some(deadline));
    loop {
        match step(engine, &mut buffers, socket) {
            Ok(Next::Step) => {}
            // One record at a time: the bytes after the handshake stay in the socket for the record
            // layer.
            Ok(Next::Receive) => receive_record(socket, &mut buffers.incoming)?,
            Ok(Next::Done) if buffers.incoming.is_empty() => break,
            Ok(Next::Done) => {
                return Err(rustls::Error::General(
                    "data beyond the handshake in one record".into(),
                )
                .into());
            }
            Err(error) => {
                // Rustls has queued an alert that tells the peer why, but never asks to transmit
                // it. So send it here; failing to do so changes nothing.
                while let Ok(Next::Step) = step(engine, &mut buffers, socket) {}
                let _ = transmit(socket, &mut buffers.outgoing);
                return Err(error);
            }
        }
    }
    socket.set_deadline(None);
    Ok(())
}

fn step<E: Engine>(
    engine: &mut E,
    buffers: &mut Buffers,
    socket: &mut Socket,
) -> Result<Next, TlsError> {
    let UnbufferedStatus { discard, state } = engine.process(&mut buffers.incoming);
    let next = match state {
        Err(error) => Err(error.into()),
        Ok(ConnectionState::EncodeTlsData(data)) => {
            encode(data, &mut buffers.outgoing).map(|()| Next::Step)
        }
        Ok(ConnectionState::TransmitTlsData(data)) => {
            data.done();
            transmit(socket, &mut buffers.outgoing).map(|()| Next::Step)
        }
        Ok(ConnectionState::BlockedHandshake) => Ok(Next::Receive),
        Ok(ConnectionState::WriteTraffic(_)) => Ok(Next::Done),
        Ok(state) => {
            Err(rustls::Error::General(format!("the peer left the handshake ({state:?})")).into())
        }
    };
    buffers.incoming.drain(..discard);
    next
}

fn transmit(socket: &mut Socket, outgoing: &mut Vec<u8>) -> Result<(), TlsError> {
    socket.send_all(&mut [IoSlice::new(outgoing)]).map_err(late)?;
    outgoing.clear();
    Ok(())
}

fn encode<Data>(mut data: EncodeTlsData<'_, Data>, outgoing: &mut Vec<u8>) -> Result<(), TlsError> {
    let start = outgoing.len();
    loop {
        match data.encode(&mut outgoing[start..]) {
            Ok(written) => {
                outgoing.truncate(start + written);
                return Ok(());
            }
            Err(EncodeError::InsufficientSize(missing)) => {
                outgoing.resize(start + missing.required_size, 0)
            }
            Err(error) => return Err(rustls::Error::General(error.to_string()).into()),
        }
    }
}

fn receive_record(socket: &mut Socket, incoming: &mut Vec<u8>) -> Result<(), TlsError> {
    let start = incoming.len();
    receive_exactly(socket, incoming, HEADER)?;
    let length = usize::from(u16::from_be_bytes([incoming[start + 3], incoming[start + 4]]));
    if length > MAX_CIPHERTEXT || start > MAX_PENDING {
        return Err(rustls::Error::General("the peer does not speak TLS".into()).into());
    }
    Ok(receive_exactly(socket, incoming, length)?)
}

fn receive_exactly(socket: &mut Socket, into: &mut Vec<u8>, count: usize) -> io::Result<()> {
    let mut at = into.len();
    into.resize(at + count, 0);
    while at < into.len() {
        match socket.recv(&mut into[at..]).map_err(late)? {
            0 => {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "the peer closed the connection",
                ));
            }
            received => at += received,
        }
    }
    Ok(())
}

/// Ends the connection of a refused client so that the client can read the alert.
///
/// A TLS 1.3 client may already have sent its first request. Closing a socket with unread bytes
/// resets the connection, and the reset overtakes the alert. So this function waits briefly until
/// the client closes its end.
fn dismiss(socket: &mut Socket, deadline: Instant) {
    socket.set_deadline(Some(deadline.min(Instant::now() + FAREWELL)));
    let _ = rustix::net::shutdown(&*socket, Shutdown::Write);
    let mut ignored = [0; 1024];
    while matches!(socket.recv(&mut ignored), Ok(1..)) {}
}

fn late(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => {
            io::Error::new(io::ErrorKind::TimedOut, "the peer took too long")
        }
        _ => error,
    }
}
