//! What the tests of all servers share.

// Each test program uses the part of it that it needs.
#![allow(dead_code)]

#[path = "../../../../store/tests/store/common/mod.rs"]
mod store;

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_fabric::ConnectionLimits;
use aquifer_store::Store;
use tempfile::TempDir;
use zerocopy::{FromBytes, IntoBytes};

pub use store::record;
use store::shm_dir;

/// No wait of a test lasts longer.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A store that is gone with the directory, which has room for a socket and other files beside it.
pub fn temporary_store() -> (TempDir, Store) {
    let dir = shm_dir();
    let store = Store::open(&dir.path().join("store")).unwrap();
    (dir, store)
}

/// Room for so many connections.
pub fn at_most(all: usize) -> ConnectionLimits {
    ConnectionLimits { all, ..ConnectionLimits::default() }
}

/// Waits until something is so.
pub fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "never: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Bytes that differ from each other and from place to place.
pub fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// Connected, with nothing said yet.
pub fn connect(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// One that speaks a protocol byte by byte.
pub trait Raw {
    fn stream(&mut self) -> &mut UnixStream;

    fn put(&mut self, bytes: &[u8]) {
        self.stream().write_all(bytes).unwrap();
    }

    fn take<T: FromBytes + IntoBytes>(&mut self) -> T {
        let mut value = T::new_zeroed();
        self.stream().read_exact(value.as_mut_bytes()).unwrap();
        value
    }

    fn take_bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.stream().read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Whether the other side has closed the connection, once all it sent is read.
    fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        // A connection closed with bytes unread is reset.
        match self.stream().read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == ErrorKind::ConnectionReset,
        }
    }
}
