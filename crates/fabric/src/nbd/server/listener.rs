use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{fmt, fs};

use aquifer_page::LeaseId;
use aquifer_store::Lease;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use super::handshake::{self, Terms};
use super::session::Session;
use super::{Exports, Limits, Peer, Security};
use crate::Address;
use crate::channel::{Channel, Socket};

/// Connections that may wait for being accepted.
const BACKLOG: i32 = 128;
/// Stack of a connection's thread: its buffers are on the heap.
const STACK: usize = 256 << 10;
/// How long a peer may leave sent bytes unacknowledged, or stay silent when probed, before its connection is given up.
const TCP_PATIENCE: Duration = Duration::from_secs(60);
/// How long to wait before accepting again when the system has no descriptor or thread left.
const BREATHER: Duration = Duration::from_millis(100);

/// The thread that accepts connections, and the book in which they are.
#[derive(Debug)]
pub(super) struct Listener {
    address: Address,
    acceptor: Acceptor,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    security: Security,
    exports: Arc<dyn Exports>,
    limits: Limits,
    book: Mutex<Book>,
    /// Rung when a connection has left the book.
    left: Condvar,
}

/// The connections there are.
#[derive(Debug, Default)]
struct Book {
    next: u64,
    open: BTreeMap<u64, Entry>,
    closing: bool,
}

#[derive(Debug)]
struct Entry {
    socket: Socket,
    /// Known once the handshake is over.
    lease: Option<LeaseId>,
    /// Shut down to make room.
    leaving: bool,
}

impl Book {
    /// Ends the connection that has been in its handshake the longest: whoever has not said what it wants must not keep
    /// out a borrower that is on its way back to its pages. False if all are past it.
    fn make_room(&mut self) -> bool {
        let dawdles = |entry: &&mut Entry| entry.lease.is_none() && !entry.leaving;
        let Some(oldest) = self.open.values_mut().find(dawdles) else { return false };
        oldest.leaving = true;
        // One that is shut down already is on its way out.
        let _ = oldest.socket.shutdown();
        true
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("limits", &self.limits)
            .field("book", &self.book)
            .finish_non_exhaustive()
    }
}

impl Listener {
    pub(super) fn start(
        address: &Address,
        security: Security,
        exports: Arc<dyn Exports>,
        limits: Limits,
    ) -> io::Result<Self> {
        let (acceptor, address) = Acceptor::bind(address)?;
        let book = Mutex::default();
        let shared = Arc::new(Shared { security, exports, limits, book, left: Condvar::new() });
        let (ours, theirs) = (acceptor.try_clone()?, Arc::clone(&shared));
        let thread = thread::Builder::new().name("nbd-accept".to_owned()).stack_size(STACK);
        let thread = thread.spawn(move || accept_all(&ours, &theirs))?;
        Ok(Self { address, acceptor, shared, thread: Some(thread) })
    }

    pub(super) fn address(&self) -> &Address {
        &self.address
    }

    pub(super) fn close_lease(&self, lease: LeaseId) {
        self.shared.close(|entry| entry.lease == Some(lease));
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.shared.locked().closing = true;
        // Wakes the thread in `accept`. It can only fail on a socket that does not listen, and then nobody waits.
        let _ = rustix::net::shutdown(self.acceptor.as_fd(), rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported by the panic hook.
            let _ = thread.join();
        }
        self.shared.close(|_| true);
        if let Address::Unix(path) = &self.address {
            // Whoever removed it before us did our work.
            let _ = fs::remove_file(path);
        }
    }
}

impl Shared {
    /// Shuts down the connections that `which` picks and waits until they have ended.
    fn close(&self, which: impl Fn(&Entry) -> bool) {
        let mut book = self.locked();
        let picked: Vec<u64> =
            book.open.iter().filter(|(_, entry)| which(entry)).map(|(&id, _)| id).collect();
        for id in &picked {
            // One that is shut down already is on its way out.
            let _ = book.open[id].socket.shutdown();
        }
        while picked.iter().any(|id| book.open.contains_key(id)) {
            book = self.left.wait(book).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn locked(&self) -> MutexGuard<'_, Book> {
        // Entries come and go whole, so a panic elsewhere cannot have left the book half written.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn accept_all(acceptor: &Acceptor, shared: &Arc<Shared>) {
    loop {
        let accepted = acceptor.accept();
        if shared.locked().closing {
            return;
        }
        let started = accepted.and_then(|(socket, peer)| start_connection(socket, peer, shared));
        if let Err(error) = started {
            tracing::warn!("a connection could not be accepted: {error}");
            // Mostly descriptors or threads have run out: some connection must end before the next can begin.
            thread::sleep(BREATHER);
        }
    }
}

fn start_connection(socket: Socket, peer: Peer, shared: &Arc<Shared>) -> io::Result<()> {
    let handle = socket.try_clone()?;
    let id = {
        let mut book = shared.locked();
        if book.open.len() >= shared.limits.connections && !book.make_room() {
            tracing::warn!("connection of {peer} refused: there are {} already", book.open.len());
            return Ok(());
        }
        book.next += 1;
        let id = book.next;
        book.open.insert(id, Entry { socket: handle, lease: None, leaving: false });
        id
    };
    let connection = Connection { id, shared: Arc::clone(shared) };
    let thread = thread::Builder::new().name(format!("nbd-{id}")).stack_size(STACK);
    // Should the thread not start, dropping the closure drops the connection, which leaves the book.
    thread.spawn(move || connection.serve(socket, peer))?;
    Ok(())
}

/// One connection's place in the book, given up when dropped.
struct Connection {
    id: u64,
    shared: Arc<Shared>,
}

impl Connection {
    fn serve(&self, socket: Socket, mut peer: Peer) {
        let Shared { security, exports, limits, .. } = &*self.shared;
        match handshake::run(socket, security, &**exports, &mut peer, limits.handshake) {
            Ok(Some(terms)) => self.transmit(terms, &peer),
            Ok(None) => {}
            Err(error) => tracing::info!("handshake with {peer} failed: {error}"),
        }
    }

    fn transmit(&self, terms: Terms, peer: &Peer) {
        let lease = terms.lease.id();
        if let Some(entry) = self.shared.locked().open.get_mut(&self.id) {
            entry.lease = Some(lease);
        }
        let _connected = Connected::new(&*self.shared.exports, &terms.lease);
        tracing::info!(%lease, "{peer} connected");
        match Session::new(terms).run() {
            Ok(()) => tracing::info!(%lease, "{peer} disconnected"),
            Err(error) => tracing::info!(%lease, "connection of {peer} ended: {error}"),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.shared.locked().open.remove(&self.id);
        self.shared.left.notify_all();
    }
}

/// Tells the exports of a connection's beginning and, when dropped, of its end.
struct Connected<'a> {
    exports: &'a dyn Exports,
    lease: LeaseId,
}

impl<'a> Connected<'a> {
    fn new(exports: &'a dyn Exports, lease: &Lease) -> Self {
        exports.connected(lease.id());
        Self { exports, lease: lease.id() }
    }
}

impl Drop for Connected<'_> {
    fn drop(&mut self) {
        self.exports.disconnected(self.lease);
    }
}

/// A listening socket of either kind.
#[derive(Debug)]
enum Acceptor {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Acceptor {
    fn bind(address: &Address) -> io::Result<(Self, Address)> {
        match address {
            Address::Unix(path) => Ok((Self::Unix(bind_unix(path)?), address.clone())),
            Address::Tcp { host, port } => {
                let listener = TcpListener::bind((host.as_str(), *port))?;
                let port = listener.local_addr()?.port();
                Ok((Self::Tcp(listener), Address::Tcp { host: host.clone(), port }))
            }
        }
    }

    fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Unix(listener) => Self::Unix(listener.try_clone()?),
            Self::Tcp(listener) => Self::Tcp(listener.try_clone()?),
        })
    }

    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }

    fn accept(&self) -> io::Result<(Socket, Peer)> {
        match self {
            Self::Unix(listener) => {
                let peer = Peer { host: None, local: true, from: "a unix socket".to_owned() };
                Ok((listener.accept()?.0.into(), peer))
            }
            Self::Tcp(listener) => {
                let (stream, from) = listener.accept()?;
                let peer = Peer { host: None, local: is_loopback(from.ip()), from: from.to_string() };
                let socket = Socket::from(stream);
                notice_dead_peers(&socket)?;
                Ok((socket, peer))
            }
        }
    }
}

fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

/// Lets the kernel end a connection whose peer has vanished without a word, so that its thread does not wait for ever.
fn notice_dead_peers(socket: &Socket) -> io::Result<()> {
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, TCP_PATIENCE / 2)?;
    sockopt::set_tcp_keepintvl(socket, TCP_PATIENCE / 6)?;
    sockopt::set_tcp_user_timeout(socket, TCP_PATIENCE.as_millis() as u32)?;
    Ok(())
}

/// Listens on a unix socket that only its owner can use, taking the place of one that nobody listens on any more.
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
    let socket: OwnedFd =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // On Linux the mode of the socket becomes that of its file, so there is no moment at which others could connect.
    rustix::fs::fchmod(&socket, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

fn is_abandoned(path: &Path) -> bool {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
    let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    is_socket && UnixStream::connect(path).err().is_some_and(refused)
}
