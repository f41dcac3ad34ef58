//! The handshake, by rustls; what comes after it is [`TlsStream`]'s.

use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_page::HostName;
use rustix::net::Shutdown;
use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::pki_types::{DnsName, ServerName};
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{ConnectionState, EncodeError, EncodeTlsData, UnbufferedStatus};
use rustls::{ClientConfig, CommonState, ServerConfig};

use super::keys::{HEADER, MAX_CIPHERTEXT};
use super::stream::{Kernel, TlsStream};
use super::{TlsError, host_name};
use crate::channel::{Channel, Socket};

/// How long a client that was refused is given to read why.
const FAREWELL: Duration = Duration::from_secs(1);
/// The most unread bytes of a handshake message in pieces. Certificates of ours take less than 1 KiB.
const MAX_PENDING: usize = 1 << 16;

/// Takes the server's part on a connected socket, and gives the client's name. The socket has no
/// deadline afterwards.
///
/// # Errors
/// When the client does not prove within `timeout` that it is a host of the cluster.
pub fn accept(
    mut socket: Socket,
    config: Arc<ServerConfig>,
    timeout: Duration,
) -> Result<(TlsStream, HostName), TlsError> {
    let deadline = Instant::now() + timeout;
    let mut engine = UnbufferedServerConnection::new(config)?;
    shake_hands(&mut engine, &mut socket, deadline)
        .inspect_err(|_| dismiss(&mut socket, deadline))?;
    let host = peer(&engine)?;
    let (secrets, kernel) = engine.dangerous_into_kernel_connection()?;
    Ok((TlsStream::new(socket, secrets, Kernel::Server(kernel))?, host))
}

/// Takes the client's part on a connected socket, which has no deadline afterwards.
///
/// In TLS 1.3 the client is done first: should the server not trust it, the first `recv` says so.
///
/// # Errors
/// When the server does not prove within `timeout` that it is `host`, and of the cluster.
pub fn connect(
    mut socket: Socket,
    config: Arc<ClientConfig>,
    host: &HostName,
    timeout: Duration,
) -> Result<TlsStream, TlsError> {
    let name = DnsName::try_from(host.as_str()).map_err(|_| TlsError::Name(host.to_string()))?;
    let mut engine = UnbufferedClientConnection::new(config, ServerName::DnsName(name.to_owned()))?;
    shake_hands(&mut engine, &mut socket, Instant::now() + timeout)?;
    let found = peer(&engine)?;
    // Verification was content with any DNS name of the certificate; the host is the one that its subject names.
    if found != *host {
        return Err(TlsError::Peer(format!(
            "its certificate is that of host {found}, not of {host}"
        )));
    }
    let (secrets, kernel) = engine.dangerous_into_kernel_connection()?;
    TlsStream::new(socket, secrets, Kernel::Client(kernel))
}

fn peer(connection: &CommonState) -> Result<HostName, TlsError> {
    let chain = connection.peer_certificates().unwrap_or_default();
    host_name(chain.first().ok_or_else(|| TlsError::Peer("it showed no certificate".to_owned()))?)
}

/// The two kinds of connection of rustls, which share no trait.
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

/// What the handshake has received and not used, and made and not sent.
#[derive(Default)]
struct Buffers {
    incoming: Vec<u8>,
    outgoing: Vec<u8>,
}

/// What to do after a step of the handshake.
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
            // One record at a time: what follows the handshake stays in the socket, for the record layer to find.
            Ok(Next::Receive) => receive_record(socket, &mut buffers.incoming)?,
            Ok(Next::Done) if buffers.incoming.is_empty() => break,
            Ok(Next::Done) => {
                return Err(rustls::Error::General(
                    "data beyond the handshake in one record".into(),
                )
                .into());
            }
            Err(error) => {
                // Rustls has an alert ready that tells the peer why, but gives it out only: it does not get to asking
                // for it to be sent. It matters to nobody if it cannot be sent.
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

/// Ends the connection of a client that was refused, in a way that lets it read why.
///
/// The client of TLS 1.3 may have sent its first request by now. Closing a socket with bytes unread resets the
/// connection, and the reset overtakes the alert: so wait, not for long, until the client has closed its end.
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
