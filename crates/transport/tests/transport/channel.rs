//! Tests of a socket with and without a deadline.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_transport::Address;
use aquifer_transport::channel::{Channel, Socket};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};

use crate::common::{TIMEOUT, pattern};

/// A size many times that of the socket's buffers.
const MUCH: usize = 4 << 20;

#[test]
fn without_a_deadline_a_slow_peer_is_waited_for() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut ours = Socket::from(ours);
    ours.set_deadline(Some(Instant::now()));
    assert_eq!(ours.recv(&mut [0; 8]).unwrap_err().kind(), ErrorKind::WouldBlock);
    ours.set_deadline(None);
    let peer = thread::spawn(move || {
        for byte in 0..10 {
            thread::sleep(Duration::from_millis(20));
            theirs.write_all(&[byte]).unwrap();
        }
        let mut taken = vec![0; MUCH];
        for some in taken.chunks_mut(MUCH / 20) {
            thread::sleep(Duration::from_millis(20));
            theirs.read_exact(some).unwrap();
        }
        taken
    });
    let mut received: Vec<u8> = Vec::new();
    while received.len() < 10 {
        let mut some = [0; 10];
        let count = ours.recv(&mut some).unwrap();
        received.extend(&some[..count]);
    }
    assert_eq!(received, (0..10).collect::<Vec<_>>());
    let sent = pattern(MUCH, 1);
    ours.send_all(&mut [IoSlice::new(&sent)]).unwrap();
    assert!(peer.join().unwrap() == sent);
}

#[test]
fn nothing_is_received_after_the_deadline_even_if_it_is_there() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut ours = Socket::from(ours);
    theirs.write_all(b"late").unwrap();
    ours.set_deadline(Some(Instant::now()));
    assert_eq!(ours.recv(&mut [0; 8]).unwrap_err().kind(), ErrorKind::WouldBlock);
    ours.set_deadline(Some(Instant::now() + TIMEOUT));
    assert_eq!(ours.recv(&mut [0; 8]).unwrap(), 4);
}

#[test]
fn a_unix_socket_that_accepts_nobody_is_given_up_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("full");
    let listener =
        socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&listener, 0).unwrap();
    // The queue of a listener with backlog 0 holds one connection.
    let _first = UnixStream::connect(&path).unwrap();
    let error = Socket::connect(&Address::Unix(path), Duration::from_millis(50)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
}
