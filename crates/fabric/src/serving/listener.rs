use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use aquifer_page::LeaseId;
use aquifer_store::End;

use super::acceptor::{Acceptor, Origin};
use crate::Address;
use crate::channel::{Channel, Socket};

/// Stack of a connection's thread: its buffers are on the heap.
const STACK: usize = 256 << 10;
/// How long to wait before accepting again when the system has no descriptor or thread left.
const BREATHER: Duration = Duration::from_millis(100);

/// What is done with connections.
pub(crate) trait Service: Send + Sync + 'static {
    /// The protocol, for the names of threads.
    const NAME: &'static str;

    /// Serves a connection to its end, on a thread of its own. MUST tell `place` when the client has said what it wants:
    /// until then it makes room for others if there are too many.
    fn serve(&self, socket: Socket, origin: Origin, place: &Place<Self>)
    where
        Self: Sized;
}

/// The thread that accepts connections, and the book in which they are. Dropping it ends them all.
pub(crate) struct Listener<S: Service> {
    address: Address,
    acceptor: Acceptor,
    shared: Arc<Shared<S>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared<S> {
    service: S,
    /// Connections at the same time.
    limit: usize,
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
    /// The client has said what it wants.
    settled: bool,
    /// What it wants, unless that is something else than a lease.
    lease: Option<LeaseId>,
    /// Shut down to make room.
    leaving: bool,
}

impl Book {
    /// Ends the connection that has been in its handshake the longest: whoever has not said what it wants must not keep
    /// out a borrower that is on its way back to its pages. False if all are past it.
    fn make_room(&mut self) -> bool {
        let dawdles = |entry: &&mut Entry| !entry.settled && !entry.leaving;
        let Some(oldest) = self.open.values_mut().find(dawdles) else { return false };
        oldest.leaving = true;
        // One that is shut down already is on its way out.
        let _ = oldest.socket.shutdown();
        true
    }
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
    /// Listens on `address` for at most `limit` connections at a time.
    pub(crate) fn start(address: &Address, limit: usize, service: S) -> io::Result<Self> {
        let (acceptor, address) = Acceptor::bind(address)?;
        let shared = Arc::new(Shared { service, limit, book: Mutex::default(), left: Condvar::new() });
        let (ours, theirs) = (acceptor.try_clone()?, Arc::clone(&shared));
        let thread = thread::Builder::new().name(format!("{}-accept", S::NAME)).stack_size(STACK);
        let thread = thread.spawn(move || accept_all(&ours, &theirs))?;
        Ok(Self { address, acceptor, shared, thread: Some(thread) })
    }

    /// Where it listens: as asked for, with the port that the kernel chose for port 0.
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Ends all connections to a lease and waits until they are gone.
    pub(crate) fn close_lease(&self, lease: LeaseId) {
        self.shared.close(|entry| entry.lease == Some(lease));
    }
}

impl<S: Service> Drop for Listener<S> {
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

impl<S> Shared<S> {
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

fn accept_all<S: Service>(acceptor: &Acceptor, shared: &Arc<Shared<S>>) {
    loop {
        let accepted = acceptor.accept();
        if shared.locked().closing {
            return;
        }
        let started = accepted.and_then(|(socket, origin)| start_connection(socket, origin, shared));
        if let Err(error) = started {
            tracing::warn!("a connection could not be accepted: {error}");
            // Mostly descriptors or threads have run out: some connection must end before the next can begin.
            thread::sleep(BREATHER);
        }
    }
}

fn start_connection<S: Service>(socket: Socket, origin: Origin, shared: &Arc<Shared<S>>) -> io::Result<()> {
    let handle = socket.try_clone()?;
    let id = {
        let mut book = shared.locked();
        if book.open.len() >= shared.limit && !book.make_room() {
            let (count, from) = (book.open.len(), origin.from);
            tracing::warn!("connection of {from} refused: there are {count} already");
            return Ok(());
        }
        book.next += 1;
        let id = book.next;
        book.open.insert(id, Entry { socket: handle, settled: false, lease: None, leaving: false });
        id
    };
    let place = Place { id, shared: Arc::clone(shared) };
    let thread = thread::Builder::new().name(format!("{}-{id}", S::NAME)).stack_size(STACK);
    // Should the thread not start, dropping the closure drops the place, and the connection leaves the book.
    thread.spawn(move || place.shared.service.serve(socket, origin, &place))?;
    Ok(())
}

/// Serves a connection of this machine that no listener took, on this thread.
pub(crate) fn serve_alone<S: Service>(service: S, stream: UnixStream) {
    let shared = Arc::new(Shared { service, limit: 1, book: Mutex::default(), left: Condvar::new() });
    let place = Place { id: 0, shared };
    let origin = Origin::unix(&stream);
    place.shared.service.serve(stream.into(), origin, &place);
}

/// One connection's place in the book, given up when dropped.
pub(crate) struct Place<S> {
    id: u64,
    shared: Arc<Shared<S>>,
}

impl<S> Place<S> {
    /// How the connection is ended from elsewhere.
    pub(crate) fn end(&self) -> io::Result<End> {
        let socket =
            self.shared.locked().open.get(&self.id).map(|entry| entry.socket.try_clone()).transpose()?;
        let socket = Mutex::new(socket);
        Ok(Box::new(move || {
            if let Some(socket) = &*socket.lock().unwrap_or_else(PoisonError::into_inner) {
                // One that is shut down already is on its way out.
                let _ = socket.shutdown();
            }
        }))
    }

    /// The client has said what it wants: this lease, or something else. It needs not make room for others any more.
    pub(crate) fn settle(&self, lease: Option<LeaseId>) {
        if let Some(entry) = self.shared.locked().open.get_mut(&self.id) {
            entry.settled = true;
            entry.lease = lease;
        }
    }
}

impl<S> Drop for Place<S> {
    fn drop(&mut self) {
        self.shared.locked().open.remove(&self.id);
        self.shared.left.notify_all();
    }
}
