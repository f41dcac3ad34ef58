//! What the protocol loops read from and write to: a plain socket, or one under TLS.

use std::cell::Cell;
use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, SocketAddrUnix,
    SocketFlags, SocketType, socket_with, sockopt,
};

use crate::Address;
use crate::lookout::{Lookout, sleep};
use crate::names;
use crate::sleep::going_to_sleep;

/// The most slices Linux takes in one `sendmsg` (`UIO_MAXIOV`).
pub const MAX_SLICES: usize = 1024;

/// A connected stream of bytes, used by one thread.
///
/// Implementations MUST NOT allocate in `recv`, `send_all` and `try_send`: they are on the page path.
pub trait Channel: Send {
    /// Waits for bytes and reads as many as have arrived and fit `buf`; 0 is the end of the stream.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when the deadline has passed.
    fn recv(&mut self, buf: &mut [u8]) -> io::Result<usize>;

    /// Sends all bytes of all slices in order, waiting for the peer until the deadline.
    ///
    /// The slices are used up (their contents are unspecified afterwards). Any number may be given.
    ///
    /// # Errors
    /// Whatever the socket says; the channel is then of no further use.
    fn send_all(&mut self, bufs: &mut [IoSlice<'_>]) -> io::Result<()>;

    /// Sends what can be sent without waiting for the peer, and says how many bytes that was (maybe none).
    ///
    /// For callers whose slices point into memory that others wait for: they copy what is left, let go of the
    /// memory and pass the copy to [`send_all`](Self::send_all).
    ///
    /// # Errors
    /// As `send_all`; not being able to send at once is no error.
    fn try_send(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let _ = bufs;
        Ok(0)
    }

    /// From this moment on `recv` and `send_all` wait for the peer no longer, also when they move a byte now and then;
    /// `None` is forever.
    fn set_deadline(&self, deadline: Option<Instant>);

    /// Whether closing it throws away what the peer has not received, so that nothing of it can arrive later; otherwise
    /// the kernel goes on sending. Means something over TCP only.
    ///
    /// # Errors
    /// Whatever the socket says.
    fn set_abortive(&self, abortive: bool) -> io::Result<()> {
        let _ = abortive;
        Ok(())
    }

    /// Ends the stream in both directions; whoever waits in `recv` or `send_all` wakes up.
    ///
    /// # Errors
    /// Whatever the socket says.
    fn shutdown(&self) -> io::Result<()>;
}

/// A connected unix or TCP stream socket.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
    deadline: Cell<Option<Instant>>,
    lookout: Lookout,
}

impl Socket {
    /// Connects within `timeout` (all addresses of a host name together).
    ///
    /// # Errors
    /// The system's, of the last address tried.
    pub fn connect(address: &Address, timeout: Duration) -> io::Result<Self> {
        match address {
            Address::Unix(path) => connect_unix(path, timeout),
            Address::Tcp { host, port } => {
                let deadline = Instant::now() + timeout;
                let mut last =
                    io::Error::new(io::ErrorKind::NotFound, format!("'{host}' has no address"));
                for candidate in names::addresses(host, *port)? {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    match TcpStream::connect_timeout(&candidate, left) {
                        Ok(stream) => return Ok(stream.into()),
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
        }
    }

    /// Ends the stream in the direction of the peer, which finds its end behind all that was sent.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn shutdown_sending(&self) -> io::Result<()> {
        Ok(rustix::net::shutdown(&self.fd, Shutdown::Write)?)
    }

    /// A second handle to the same socket, to shut it down from another thread.
    ///
    /// # Errors
    /// The system's (too many open files).
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { deadline: self.deadline.clone(), ..Self::from(self.fd.try_clone()?) })
    }
}

impl From<OwnedFd> for Socket {
    fn from(fd: OwnedFd) -> Self {
        Self { fd, deadline: Cell::new(None), lookout: Lookout::new() }
    }
}

impl From<UnixStream> for Socket {
    fn from(stream: UnixStream) -> Self {
        OwnedFd::from(stream).into()
    }
}

impl From<TcpStream> for Socket {
    /// Takes the stream over and turns off Nagle's algorithm: requests and replies are sent whole.
    fn from(stream: TcpStream) -> Self {
        // A socket that is already dead refuses; its first use will say so.
        let _ = stream.set_nodelay(true);
        OwnedFd::from(stream).into()
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Channel for Socket {
    fn recv(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let Self { fd, deadline, lookout } = self;
        lookout.wait(fd.as_fd(), deadline.get(), || recv(fd, buf))
    }

    fn send_all(&mut self, mut bufs: &mut [IoSlice<'_>]) -> io::Result<()> {
        IoSlice::advance_slices(&mut bufs, 0);
        while !bufs.is_empty() {
            match send(&self.fd, bufs) {
                Ok(sent) => IoSlice::advance_slices(&mut bufs, sent),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    going_to_sleep();
                    sleep(self.fd.as_fd(), PollFlags::OUT, self.deadline.get())?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn try_send(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut total = 0;
        for some in bufs.chunks(MAX_SLICES) {
            let wanted: usize = some.iter().map(|slice| slice.len()).sum();
            match send(&self.fd, some) {
                Ok(sent) => total += sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(total),
                Err(error) => return Err(error),
            }
            if total < wanted {
                return Ok(total);
            }
        }
        Ok(total)
    }

    fn set_deadline(&self, deadline: Option<Instant>) {
        self.deadline.set(deadline);
    }

    fn set_abortive(&self, abortive: bool) -> io::Result<()> {
        // A linger time of zero makes close(2) a reset (socket(7), RFC 9293 section 3.10.5 "ABORT").
        Ok(sockopt::set_socket_linger(&self.fd, abortive.then_some(Duration::ZERO))?)
    }

    fn shutdown(&self) -> io::Result<()> {
        match rustix::net::shutdown(&self.fd, Shutdown::Both) {
            Err(Errno::NOTCONN) => Ok(()),
            result => Ok(result?),
        }
    }
}

fn connect_unix(path: &Path, timeout: Duration) -> io::Result<Socket> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // For a server that accepts nobody, whose queue is full (unix(7)). Later sends do not wait in the kernel.
    sockopt::set_socket_timeout(
        &socket,
        sockopt::Timeout::Send,
        Some(timeout.max(Duration::from_millis(1))),
    )?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Err(Errno::AGAIN) => Err(io::ErrorKind::TimedOut.into()),
        result => Ok(result.map(|()| socket.into())?),
    }
}

/// One `recv` that does not wait.
fn recv(fd: &OwnedFd, buf: &mut [u8]) -> io::Result<usize> {
    loop {
        match rustix::net::recv(fd, &mut *buf, RecvFlags::DONTWAIT) {
            Ok((_, received)) => return Ok(received),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// One `sendmsg` of at most [`MAX_SLICES`] slices, that does not wait.
fn send(fd: &OwnedFd, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let some = &bufs[..bufs.len().min(MAX_SLICES)];
    loop {
        match rustix::net::sendmsg(fd, some, &mut SendAncillaryBuffer::default(), flags) {
            Err(Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}
