//! Tests that the client's timeout also ends an operation if the peer moves few bytes at a time.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use aquifer_nbd::client::{Connection, Failure, NbdError, Target};
use aquifer_transport::Address;
use aquifer_transport::tls::Identity;
use rustix::event::{PollFd, PollFlags, poll};

use super::{NbdLender, TIMEOUT, unix};
use crate::certificates::{Cluster, host};
use crate::operations::pattern;

/// The client's timeout for an operation.
const SHORT: Duration = Duration::from_millis(800);
/// The relay's pause after each piece: far less than the client's timeout.
const PAUSE: Duration = Duration::from_millis(15);

/// A relay between a client and a server that passes on their bytes, at full speed or slowly.
struct Relay {
    address: Address,
    pace: Arc<Pace>,
}

#[derive(Clone, Copy, PartialEq)]
enum Slow {
    Requests,
    Replies,
}

#[derive(Default)]
struct Pace {
    /// Bytes of a piece, with a pause after each; 0 for full speed.
    piece: AtomicUsize,
    /// Bytes that the relay has passed on in such pieces.
    passed: AtomicUsize,
}

impl Relay {
    /// Starts a relay that can slow down the requests or the replies.
    fn start(server: &Address, slow: Slow) -> Self {
        let Address::Unix(server) = server.clone() else { panic!("a unix socket is needed") };
        let address = Address::Unix(server.with_file_name("relay"));
        let listener = UnixListener::bind(server.with_file_name("relay")).unwrap();
        let pace = Arc::<Pace>::default();
        let shared = pace.clone();
        // The thread ends with the connection, which the test drops.
        thread::spawn(move || {
            let (client, _) = listener.accept().unwrap();
            let server = UnixStream::connect(server).unwrap();
            let full = Arc::<Pace>::default();
            let (there, back) =
                if slow == Slow::Requests { (shared, full) } else { (full, shared) };
            let (from, to) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            thread::spawn(move || pass(from, to, &back));
            pass(client, server, &there);
        });
        Self { address, pace }
    }
}

/// Waits for bytes or the end of the stream.
fn has_bytes(from: &UnixStream) -> bool {
    poll(&mut [PollFd::new(from, PollFlags::IN)], None).is_ok()
}

fn pass(mut from: UnixStream, mut to: UnixStream, pace: &Pace) {
    let mut buffer = vec![0; 64 << 10];
    while has_bytes(&from) {
        let piece = pace.piece.load(Ordering::SeqCst);
        let most = if piece == 0 { buffer.len() } else { piece };
        match from.read(&mut buffer[..most]) {
            Ok(count @ 1..) if to.write_all(&buffer[..count]).is_ok() => {
                if piece > 0 {
                    pace.passed.fetch_add(count, Ordering::SeqCst);
                    thread::sleep(PAUSE);
                }
            }
            _ => break,
        }
    }
    _ = from.shutdown(Shutdown::Both);
    _ = to.shutdown(Shutdown::Both);
}

/// Checks that the client gives up an operation of `length` bytes before all have moved.
///
/// The bytes move in pieces of `piece` bytes.
fn is_given_up(
    identities: Option<&(Identity, Identity)>,
    (slow, length, piece): (Slow, usize, usize),
    operation: impl FnOnce(&mut Connection, &mut [u8]) -> Result<(), NbdError> + Send + 'static,
) {
    let lender = NbdLender::start(unix, identities.map(|(lender, _)| lender));
    let relay = Relay::start(lender.server.address(), slow);
    let tls = identities.map(|(_, borrower)| (borrower.client(), host("lender")));
    let target = Target { address: relay.address.clone(), export: "pages".into(), tls };
    let mut connection = Connection::connect(Arc::new(target), TIMEOUT).unwrap();
    let mut data = pattern(length, 1);
    connection.write(0, &data[..length.min(1 << 20)]).unwrap();
    connection.set_io_timeout(SHORT);
    relay.pace.piece.store(piece, Ordering::SeqCst);
    let (result, ended) = mpsc::channel();
    let worker = thread::spawn(move || result.send(operation(&mut connection, &mut data)).unwrap());
    let error = ended.recv_timeout(TIMEOUT).expect("the operation ends").unwrap_err();
    worker.join().unwrap();
    assert!(matches!(error.failure, Failure::Silent(_)), "{error}");
    let passed = relay.pace.passed.load(Ordering::SeqCst);
    assert!(passed < length, "{passed} of {length} bytes moved before it was given up");
}

fn with_and_without_tls(check: impl Fn(Option<&(Identity, Identity)>)) {
    check(None);
    let cluster = Cluster::new();
    check(Some(&(cluster.identity("lender"), cluster.identity("borrower"))));
}

#[test]
fn a_reply_that_trickles_is_given_up_when_the_timeout_ends() {
    with_and_without_tls(|identities| {
        is_given_up(identities, (Slow::Replies, 8 << 10, 1), |client, data| client.read(0, data));
    });
}

#[test]
fn a_write_that_trickles_away_is_given_up_when_the_timeout_ends() {
    // Larger than the buffers of all sockets, so that most of it is unsent when they are full.
    with_and_without_tls(|identities| {
        is_given_up(identities, (Slow::Requests, 32 << 20, 16 << 10), |client, data| {
            client.write(0, data)
        });
    });
}
