//! Helpers that the tests of all servers share.

// Each test uses only a part of this module.
#![allow(dead_code, unused_imports)]

#[path = "../../../../hosts/src/wait.rs"]
mod wait;

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use aquifer_transport::ConnectionLimits;
use zerocopy::{FromBytes, IntoBytes};

pub use wait::wait_until;

/// The upper limit for every wait of a test.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// Returns limits of `all` connections in total.
pub fn at_most(all: usize) -> ConnectionLimits {
    ConnectionLimits { all, ..ConnectionLimits::default() }
}

/// Returns pseudo-random bytes, so that no two places hold the same content.
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

/// Connects and sends nothing.
pub fn connect(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.set_write_timeout(Some(TIMEOUT)).unwrap();
    stream
}

/// A client that speaks a protocol byte by byte.
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

    /// Discards all pending bytes and waits until the other side closes the connection; false on an
    /// unexpected error.
    fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        // The kernel resets a connection that is closed with bytes unread.
        match self.stream().read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == ErrorKind::ConnectionReset,
        }
    }
}
