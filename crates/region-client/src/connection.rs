//! Unix sockets that preserve packet boundaries and carry file descriptors.

use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind,
    connect, listen, recvmsg, sendmsg, socket_with, sockopt,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::sys;

/// The largest message, in bytes.
const LONGEST: usize = 16 << 10;

/// The most descriptors in one message.
const DESCRIPTORS: usize = 2;

/// A socket that accepts connections of programs.
#[derive(Debug)]
pub struct Listener(OwnedFd);

/// A connection to the other side.
#[derive(Debug)]
pub struct Connection(OwnedFd);

fn socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

impl Listener {
    /// Listens at this path, with access for root only. Replaces the socket of a dead process.
    pub fn bind(path: &Path) -> io::Result<Self> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let socket = socket()?;
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        listen(&socket, 16)?;
        Ok(Self(socket))
    }

    /// Waits for the next connection.
    pub fn accept(&self) -> io::Result<Connection> {
        Ok(Connection(rustix::io::retry_on_intr(|| accept_with(&self.0, SocketFlags::CLOEXEC))?))
    }
}

impl Connection {
    /// Connects to the socket at this path.
    pub fn to(path: &Path) -> io::Result<Self> {
        let socket = socket()?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self(socket))
    }

    /// Returns the id of the process that opened the other end.
    pub fn peer(&self) -> io::Result<u32> {
        Ok(sockopt::socket_peercred(&self.0)?.pid.as_raw_nonzero().get().cast_unsigned())
    }

    /// Returns a pidfd of that process, readable once the process has ended. The connection's end
    /// says less, as the process's forked children hold it, too.
    pub fn peer_process(&self) -> io::Result<OwnedFd> {
        sys::peer_process(self.as_fd())
    }

    /// Sends a message with these descriptors, at most two.
    pub fn send(&self, message: &impl Serialize, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let bytes = postcard::to_stdvec(message).map_err(invalid)?;
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut room);
        if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors))
        {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let sent = rustix::io::retry_on_intr(|| {
            sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL)
        })?;
        if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// Waits for the next message. Returns `None` if the other side is gone.
    pub fn receive<T: DeserializeOwned>(&self) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
        let mut bytes = [0; LONGEST];
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut room);
        let received = rustix::io::retry_on_intr(|| {
            recvmsg(
                &self.0,
                &mut [IoSliceMut::new(&mut bytes)],
                &mut ancillary,
                RecvFlags::CMSG_CLOEXEC,
            )
        });
        let length = match received {
            Ok(received) => received.bytes,
            Err(rustix::io::Errno::CONNRESET) => 0,
            Err(error) => return Err(error.into()),
        };
        if length == 0 {
            return Ok(None);
        }
        let mut all = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                all.extend(descriptors);
            }
        }
        Ok(Some((postcard::from_bytes(&bytes[..length]).map_err(invalid)?, all)))
    }

    /// Shuts the connection, so that threads that wait on either side find it ended.
    pub fn shut(&self) {
        // An error means that the connection is gone already.
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn invalid(error: postcard::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
