//! Listening sockets, unix and TCP, and the origin of the connections that they accept.

use std::fs;
use std::io;
use std::net::{IpAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use crate::Address;
use crate::channel::Socket;

/// Connections to a unix socket that may wait to be accepted.
const BACKLOG: i32 = 128;
/// How long a peer may leave sent bytes or probes unacknowledged before the kernel ends the
/// connection.
const TCP_TIMEOUT: Duration = Duration::from_secs(60);

/// Peer's end of an accepted connection, as far as the socket shows it.
#[derive(Clone, Debug)]
pub struct Origin {
    /// On this machine: a unix socket or a loopback address.
    pub local: bool,
    /// Peer's address; `None` for a unix socket.
    pub ip: Option<IpAddr>,
    /// Process that connected, where the kernel tells: on unix sockets.
    pub process: Option<u32>,
    /// Text for messages.
    pub from: String,
}

impl Origin {
    pub(super) fn unix(stream: &UnixStream) -> Self {
        let process = sockopt::socket_peercred(stream).ok();
        let process = process.map(|peer| peer.pid.as_raw_nonzero().get() as u32);
        Self { local: true, ip: None, process, from: "a unix socket".to_owned() }
    }
}

#[derive(Debug)]
pub(super) enum Acceptor {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Acceptor {
    pub(super) fn bind(address: &Address) -> io::Result<(Self, Address)> {
        match address {
            Address::Unix(path) => Ok((Self::Unix(bind_unix(path)?), address.clone())),
            Address::Tcp { host, port } => {
                let listener = TcpListener::bind((host.as_str(), *port))?;
                let port = listener.local_addr()?.port();
                Ok((Self::Tcp(listener), Address::Tcp { host: host.clone(), port }))
            }
        }
    }

    pub(super) fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Unix(listener) => Self::Unix(listener.try_clone()?),
            Self::Tcp(listener) => Self::Tcp(listener.try_clone()?),
        })
    }

    pub(super) fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }

    pub(super) fn accept(&self) -> io::Result<(Socket, Origin)> {
        match self {
            Self::Unix(listener) => {
                let (stream, _) = listener.accept()?;
                let origin = Origin::unix(&stream);
                Ok((stream.into(), origin))
            }
            Self::Tcp(listener) => {
                let (stream, from) = listener.accept()?;
                let ip = from.ip().to_canonical();
                let (local, from) = (ip.is_loopback(), from.to_string());
                let origin = Origin { local, ip: Some(ip), process: None, from };
                let socket = Socket::from(stream);
                notice_dead_peers(&socket)?;
                Ok((socket, origin))
            }
        }
    }
}

/// Lets the kernel end a connection if its peer vanishes, so that the connection's thread does not
/// wait forever.
fn notice_dead_peers(socket: &Socket) -> io::Result<()> {
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, TCP_TIMEOUT / 2)?;
    sockopt::set_tcp_keepintvl(socket, TCP_TIMEOUT / 6)?;
    sockopt::set_tcp_user_timeout(socket, TCP_TIMEOUT.as_millis() as u32)?;
    Ok(())
}

/// Listens on a unix socket that only its owner can use. Replaces a socket on which no process
/// listens.
fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    match listen_unix(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_abandoned(path) => {
            fs::remove_file(path)?;
            listen_unix(path)
        }
        result => result,
    }
}

fn listen_unix(path: &Path) -> io::Result<UnixListener> {
    let socket: OwnedFd = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // On Linux the file takes the socket's mode, so at no moment can other users connect.
    rustix::fs::fchmod(&socket, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

fn is_abandoned(path: &Path) -> bool {
    let is_socket =
        fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
    let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    is_socket && UnixStream::connect(path).err().is_some_and(refused)
}
