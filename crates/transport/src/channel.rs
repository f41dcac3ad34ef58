//! Byte streams of the protocol loops: a plain socket, or one under TLS.

use std::cell::Cell;
use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, SocketAddrUnix,
    SocketFlags, SocketType, socket_with, sockopt,
};

use crate::Address;
use crate::lookout::{Lookout, sleep};
use crate::names;
use crate::sleep::going_to_sleep;

/// Most slices that Linux takes in one `sendmsg` (`UIO_MAXIOV`).
pub const MAX_SLICES: usize = 1024;

/// Connected stream of bytes, used by one thread.
///
/// Implementations MUST NOT allocate in `recv`, `send_all` and `try_send`: these are on the page
/// path.
pub trait Channel: Send {
    /// Waits for bytes and reads as many as have arrived and fit `buf`; returns 0 at the end of the
    /// stream.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when the deadline has passed; otherwise the socket's error.
    fn recv(&mut self, buf: &mut [u8]) -> io::Result<usize>;

    /// Sends all bytes of all slices in order, waiting for the peer until the deadline.
    ///
    /// Takes any number of slices and uses them up: their contents are unspecified afterwards.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when the deadline has passed; otherwise the socket's error.
    /// The channel is then of no further use.
    fn send_all(&mut self, bufs: &mut [IoSlice<'_>]) -> io::Result<()>;

    /// Sends as many bytes as it can without waiting for the peer, and returns their number, which
    /// may be 0.
    ///
    /// For callers that send from memory that other threads wait for. Such a caller copies the
    /// rest, releases the memory and passes the copy to [`send_all`](Self::send_all).
    ///
    /// # Errors
    /// As `send_all`; a full socket is not an error.
    fn try_send(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let _ = bufs;
        Ok(0)
    }

    /// Sets the time at which `recv` and `send_all` stop waiting for the peer, even if bytes still
    /// trickle. `None` waits without limit.
    fn set_deadline(&self, deadline: Option<Instant>);

    /// Selects whether closing discards the bytes that the peer has not received, so that none of
    /// them arrives later. Otherwise the kernel goes on sending them. Only TCP is affected.
    ///
    /// # Errors
    /// The socket's error.
    fn set_abortive(&self, abortive: bool) -> io::Result<()> {
        let _ = abortive;
        Ok(())
    }

    /// Waits for `time` without reading, so that the peer can send no more than the kernel keeps.
    ///
    /// # Errors
    /// [`io::ErrorKind::ConnectionAborted`] as soon as the peer has ended the stream: it waits for
    /// no reply.
    fn pause(&self, time: Duration) -> io::Result<()>;

    /// Ends the stream in both directions and wakes a thread that waits in `recv`, `send_all` or
    /// `pause`.
    ///
    /// # Errors
    /// The socket's error.
    fn shutdown(&self) -> io::Result<()>;
}

/// Connected unix or TCP stream socket.
#[derive(Debug)]
pub struct Socket {
    fd: Arc<OwnedFd>,
    deadline: Cell<Option<Instant>>,
    lookout: Lookout,
}

impl Socket {
    /// Connects within `timeout`, which covers all addresses of a host name together.
    ///
    /// A name lookup counts against `timeout`, but is not cut short.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if the host has no address, [`io::ErrorKind::TimedOut`] if time
    /// runs out. Otherwise the system's error for the last address tried.
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

    /// Ends the stream towards the peer, which reads all sent bytes and then the end of the stream.
    ///
    /// # Errors
    /// The system's error.
    pub fn shutdown_sending(&self) -> io::Result<()> {
        Ok(rustix::net::shutdown(&self.fd, Shutdown::Write)?)
    }

    /// Returns a handle that keeps the socket neither open nor from being closed.
    pub(crate) fn weak(&self) -> Weak<OwnedFd> {
        Arc::downgrade(&self.fd)
    }

    /// Returns a second handle to the same socket, to shut it down from another thread.
    ///
    /// # Errors
    /// The system's error, such as too many open files.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { deadline: self.deadline.clone(), ..Self::from(self.fd.try_clone()?) })
    }
}

impl Socket {
    /// Returns whether the peer, this end or an error has ended the stream.
    fn has_ended(&self) -> bool {
        let mut polled = [PollFd::new(&self.fd, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut polled, Some(&now)), Ok(1..))
    }
}

impl From<OwnedFd> for Socket {
    fn from(fd: OwnedFd) -> Self {
        Self { fd: Arc::new(fd), deadline: Cell::new(None), lookout: Lookout::new() }
    }
}

impl From<UnixStream> for Socket {
    fn from(stream: UnixStream) -> Self {
        OwnedFd::from(stream).into()
    }
}

impl From<TcpStream> for Socket {
    /// Takes over the stream and turns off Nagle's algorithm: requests and replies are sent whole.
    fn from(stream: TcpStream) -> Self {
        // A dead socket refuses the option; its first use reports the error.
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
        // A linger time of zero turns close(2) into a reset (socket(7); RFC 9293, section 3.10.5).
        Ok(sockopt::set_socket_linger(&self.fd, abortive.then_some(Duration::ZERO))?)
    }

    fn pause(&self, time: Duration) -> io::Result<()> {
        going_to_sleep();
        match sleep(self.fd.as_fd(), PollFlags::RDHUP, Some(Instant::now() + time)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Ok(()) if self.has_ended() => Err(io::ErrorKind::ConnectionAborted.into()),
            result => result,
        }
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
    // Limits the wait for a server that accepts nothing and has a full queue (unix(7)). Later sends
    // do not wait in the kernel.
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

/// Receives once, without waiting.
fn recv(fd: &OwnedFd, buf: &mut [u8]) -> io::Result<usize> {
    loop {
        match rustix::net::recv(fd, &mut *buf, RecvFlags::DONTWAIT) {
            Ok((_, received)) => return Ok(received),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Sends at most [`MAX_SLICES`] slices with one `sendmsg`, without waiting.
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
