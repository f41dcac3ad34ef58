//! Listener that accepts connections and serves each on a thread of its own.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use aquifer_page::visitor::End;
use aquifer_page::{LeaseId, lock};

use super::acceptor::{Acceptor, Origin};
use super::book::{Book, ConnectionLimits};
use crate::Address;
use crate::accepting;
use crate::channel::{Channel, Socket};

/// Stack of a connection's thread, in bytes; the thread's buffers are on the heap.
const STACK: usize = 256 << 10;

/// Protocol that the connections of a listener speak.
pub trait Service: Send + Sync + 'static {
    /// Name of the protocol, for threads and logs.
    const NAME: &'static str;

    /// Serves a connection to its end, on a thread of its own.
    ///
    /// Implementations MUST call [`Place::settle`] once the client has made its choice. Until then
    /// the listener may end the connection to make room for others.
    fn serve(&self, socket: Socket, origin: Origin, place: &Place<Self>)
    where
        Self: Sized;
}

/// The reason why a server cannot listen.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: {source}")]
pub struct ListenError {
    /// The address.
    pub address: Address,
    /// The error of the operating system.
    pub source: io::Error,
}

/// Thread that accepts connections, and the book of those connections. Dropping it ends them all.
pub struct Listener<S: Service> {
    address: Address,
    acceptor: Acceptor,
    shared: Arc<Shared<S>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared<S> {
    service: S,
    book: Mutex<Book<Socket>>,
    closing: AtomicBool,
    /// Notified when a connection has left the book.
    left: Condvar,
}

impl<S: Service> fmt::Debug for Listener<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener")
            .field("address", &self.address)
            .field("book", &self.shared.book)
            .finish_non_exhaustive()
    }
}

impl<S: Service> Listener<S> {
    /// Listens on `address` for as many connections at a time as `limits` allows.
    ///
    /// # Errors
    /// [`ListenError`], with the address.
    pub fn start(
        address: &Address,
        limits: ConnectionLimits,
        service: S,
    ) -> Result<Self, ListenError> {
        Self::try_start(address, limits, service)
            .map_err(|source| ListenError { address: address.clone(), source })
    }

    fn try_start(address: &Address, limits: ConnectionLimits, service: S) -> io::Result<Self> {
        let (acceptor, address) = Acceptor::bind(address)?;
        let shared = Arc::new(Shared::new(service, limits));
        let (ours, theirs) = (acceptor.try_clone()?, Arc::clone(&shared));
        let thread = thread::Builder::new().name(format!("{}-accept", S::NAME)).stack_size(STACK);
        let thread = thread.spawn(move || accept_all(&ours, &theirs))?;
        Ok(Self { address, acceptor, shared, thread: Some(thread) })
    }

    /// Returns the address as requested, with the port that the kernel chose for port 0.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Ends all connections to a lease and waits until they are gone.
    pub fn close_lease(&self, lease: LeaseId) {
        self.shared.close(|of| of == Some(lease));
    }
}

impl<S: Service> Drop for Listener<S> {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        // Wakes the thread in `accept`. The call fails only on a socket that does not listen, and
        // then no thread waits.
        let _ = rustix::net::shutdown(self.acceptor.as_fd(), rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            // The panic hook has already reported a panic of the thread.
            let _ = thread.join();
        }
        self.shared.close(|_| true);
        if let Address::Unix(path) = &self.address {
            // Another process may have removed the file first.
            let _ = fs::remove_file(path);
        }
    }
}

impl<S> Shared<S> {
    fn new(service: S, limits: ConnectionLimits) -> Self {
        let book = Mutex::new(Book::new(limits));
        Self { service, book, closing: AtomicBool::new(false), left: Condvar::new() }
    }

    /// Shuts down the connections to the leases that `which` picks, and waits until they have
    /// ended.
    fn close(&self, which: impl Fn(Option<LeaseId>) -> bool) {
        let mut book = self.locked();
        let mut picked = Vec::new();
        for (id, _, socket) in book.iter().filter(|(_, lease, _)| which(*lease)) {
            // If this fails, the connection is ending already.
            let _ = socket.shutdown();
            picked.push(id);
        }
        while picked.iter().any(|id| book.get(*id).is_some()) {
            book = self.left.wait(book).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn locked(&self) -> MutexGuard<'_, Book<Socket>> {
        // Every change of the book is complete, so a panic elsewhere cannot leave it half written.
        lock(&self.book)
    }
}

fn accept_all<S: Service>(acceptor: &Acceptor, shared: &Arc<Shared<S>>) {
    accepting::each(
        &format!("{} connections", S::NAME),
        || shared.closing.load(Ordering::SeqCst),
        || acceptor.accept(),
        |(socket, origin)| start_connection(socket, origin, shared),
    );
}

fn start_connection<S: Service>(
    socket: Socket,
    origin: Origin,
    shared: &Arc<Shared<S>>,
) -> io::Result<()> {
    let handle = socket.try_clone()?;
    let id = {
        let mut book = shared.locked();
        match book.admit(origin.ip, handle) {
            Ok((id, leaves)) => {
                // If this fails, the connection is ending already.
                let _ = leaves.map(Channel::shutdown);
                id
            }
            Err(full) => {
                tracing::warn!("refused a connection from {}: {full}", origin.from);
                return Ok(());
            }
        }
    };
    let place = Place { id, shared: Arc::clone(shared) };
    let thread = thread::Builder::new().name(format!("{}-{id}", S::NAME)).stack_size(STACK);
    // If the thread does not start, dropping the closure drops the place, and the connection leaves
    // the book.
    thread.spawn(move || place.shared.service.serve(socket, origin, &place))?;
    Ok(())
}

/// Serves a connection that no listener accepted, on this thread.
pub fn serve_alone<S: Service>(service: S, stream: UnixStream) {
    let shared = Arc::new(Shared::new(service, ConnectionLimits::default()));
    let place = Place { id: 0, shared };
    let origin = Origin::unix(&stream);
    place.shared.service.serve(stream.into(), origin, &place);
}

/// Entry of one connection in the book, removed on drop.
pub struct Place<S> {
    id: u64,
    shared: Arc<Shared<S>>,
}

impl<S> fmt::Debug for Place<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place").field("id", &self.id).finish_non_exhaustive()
    }
}

impl<S> Place<S> {
    /// Returns a closure that ends the connection from another thread.
    ///
    /// # Errors
    /// The system's error, such as too many open files.
    pub fn end(&self) -> io::Result<End> {
        let socket = self.shared.locked().get(self.id).map(Socket::try_clone).transpose()?;
        let socket = Mutex::new(socket);
        Ok(Box::new(move || {
            if let Some(socket) = &*lock(&socket) {
                // If this fails, the connection is ending already.
                let _ = socket.shutdown();
            }
        }))
    }

    /// Records the lease that the client wants, before the client is admitted to it. The connection
    /// may still be ended to make room, and it ends with the lease.
    pub fn note(&self, lease: LeaseId) {
        self.shared.locked().note(self.id, lease);
    }

    /// Records the client's choice, a lease or another export: from here on the connection keeps
    /// its place.
    pub fn settle(&self, lease: Option<LeaseId>) {
        self.shared.locked().settle(self.id, lease);
    }
}

impl<S> Drop for Place<S> {
    fn drop(&mut self) {
        self.shared.locked().remove(self.id);
        self.shared.left.notify_all();
    }
}
