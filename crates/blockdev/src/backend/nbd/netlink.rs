//! The nbd driver's control messages (`linux/nbd-netlink.h`) over generic netlink.
//!
//! The driver's ioctls need several steps and a thread that waits in the kernel. These messages
//! make a device in one step, so that no process can open it half-made.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType};

const GENERIC: u32 = 16;
const REQUEST: u16 = 1;
const ACKNOWLEDGE: u16 = 4;
const ERROR: u16 = 2;

/// Bytes of `struct nlmsghdr` and `struct genlmsghdr`.
const HEADER: usize = 16 + 4;
const NESTED: u16 = 0x8000;

const CONTROLLER: u16 = 16;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;

const CONNECT: u8 = 1;
const DISCONNECT: u8 = 2;
const INDEX: u16 = 1;
const SIZE_BYTES: u16 = 2;
const BLOCK_SIZE_BYTES: u16 = 3;
const TIMEOUT: u16 = 4;
const SERVER_FLAGS: u16 = 5;
const CLIENT_FLAGS: u16 = 6;
const SOCKETS: u16 = 7;
const BACKEND_IDENTIFIER: u16 = 10;
const SOCKET_ITEM: u16 = 1;
const SOCKET_FD: u16 = 1;

/// `NBD_CFLAG_DISCONNECT_ON_CLOSE`: the driver disconnects when the last user closes the device.
const DISCONNECT_ON_CLOSE: u64 = 1 << 1;

/// Parameters of a new device.
pub(super) struct Connect<'a> {
    pub(super) size: u64,
    pub(super) block_size: u64,
    /// Seconds without a reply after which the driver gives up a connection.
    pub(super) timeout: u64,
    /// Transmission flags of the NBD protocol.
    pub(super) flags: u16,
    /// Text that the driver shows in the device's `backend` attribute.
    pub(super) label: &'a str,
    /// Socket of the connection; the driver takes its own reference to it.
    pub(super) socket: BorrowedFd<'a>,
}

/// A netlink connection to the driver.
#[derive(Debug)]
pub(super) struct Driver {
    socket: File,
    family: u16,
}

impl Driver {
    /// Connects to the driver. Fails with `ENOENT` if the driver is not loaded.
    pub(super) fn open() -> io::Result<Self> {
        let protocol = Protocol::from_raw(GENERIC.try_into().map_err(io::Error::other)?);
        let socket = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(protocol),
        )?;
        let mut driver = Self { socket: socket.into(), family: CONTROLLER };
        let mut request = Message::new(CONTROLLER, GET_FAMILY);
        request.attribute(FAMILY_NAME, b"nbd\0");
        let answer = driver.call(request)?;
        driver.family = find(&answer, FAMILY_ID)
            .and_then(|value| Some(u16::from_ne_bytes(*value.first_chunk()?)))
            .ok_or_else(malformed)?;
        Ok(driver)
    }

    /// Connects an unused device and returns its number.
    pub(super) fn connect(&mut self, connect: &Connect<'_>) -> io::Result<u32> {
        let mut request = Message::new(self.family, CONNECT);
        request.attribute(SIZE_BYTES, &connect.size.to_ne_bytes());
        request.attribute(BLOCK_SIZE_BYTES, &connect.block_size.to_ne_bytes());
        request.attribute(TIMEOUT, &connect.timeout.to_ne_bytes());
        request.attribute(SERVER_FLAGS, &u64::from(connect.flags).to_ne_bytes());
        request.attribute(CLIENT_FLAGS, &DISCONNECT_ON_CLOSE.to_ne_bytes());
        request.attribute(BACKEND_IDENTIFIER, format!("{}\0", connect.label).as_bytes());
        let mut item = Message::default();
        item.attribute(SOCKET_FD, &(connect.socket.as_raw_fd() as u32).to_ne_bytes());
        let mut sockets = Message::default();
        sockets.attribute(SOCKET_ITEM | NESTED, &item.bytes);
        request.attribute(SOCKETS | NESTED, &sockets.bytes);
        let answer = self.call(request)?;
        find(&answer, INDEX)
            .and_then(|value| Some(u32::from_ne_bytes(*value.first_chunk()?)))
            .ok_or_else(malformed)
    }

    /// Disconnects a device even if it is in use.
    pub(super) fn disconnect(&mut self, index: u32) -> io::Result<()> {
        let mut request = Message::new(self.family, DISCONNECT);
        request.attribute(INDEX, &index.to_ne_bytes());
        self.call(request).map(drop)
    }

    /// Sends a request and returns the attributes of its answer, empty if the kernel sends an
    /// acknowledgement only.
    fn call(&mut self, request: Message) -> io::Result<Vec<u8>> {
        self.socket.write_all(&request.finish())?;
        let mut answer = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            let length = self.socket.read(&mut buffer)?;
            let message = &buffer[..length];
            let kind =
                message.get(4..6).and_then(|kind| Some(u16::from_ne_bytes(*kind.first_chunk()?)));
            match kind.ok_or_else(malformed)? {
                ERROR => {
                    let code = message
                        .get(16..)
                        .and_then(|code| code.first_chunk())
                        .ok_or_else(malformed)?;
                    return match i32::from_ne_bytes(*code) {
                        0 => Ok(answer),
                        code => Err(io::Error::from_raw_os_error(-code)),
                    };
                }
                _ => answer = message.get(HEADER..).ok_or_else(malformed)?.to_vec(),
            }
        }
    }
}

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the kernel's netlink answer cannot be understood")
}

/// A message, or the content of a nested attribute.
#[derive(Default)]
struct Message {
    bytes: Vec<u8>,
}

impl Message {
    fn new(family: u16, command: u8) -> Self {
        let mut bytes = vec![0; HEADER];
        bytes[4..6].copy_from_slice(&family.to_ne_bytes());
        bytes[6..8].copy_from_slice(&(REQUEST | ACKNOWLEDGE).to_ne_bytes());
        bytes[16] = command;
        bytes[17] = 1;
        Self { bytes }
    }

    fn attribute(&mut self, kind: u16, value: &[u8]) {
        self.bytes.extend_from_slice(&((4 + value.len()) as u16).to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        let length = self.bytes.len() as u32;
        self.bytes[..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes
    }
}

/// Finds an attribute's value.
fn find(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let length = u16::from_ne_bytes(*attributes.first_chunk()?) as usize;
        let kind = u16::from_ne_bytes(*attributes.get(2..)?.first_chunk()?);
        let value = attributes.get(4..length)?;
        if kind & !NESTED == wanted {
            return Some(value);
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attribute_is_found_behind_others_of_odd_lengths() {
        let mut message = Message::default();
        message.attribute(1, b"abc");
        message.attribute(2 | NESTED, b"");
        message.attribute(3, &7u32.to_ne_bytes());
        assert_eq!(find(&message.bytes, 1), Some(&b"abc"[..]));
        assert_eq!(find(&message.bytes, 2), Some(&b""[..]));
        assert_eq!(find(&message.bytes, 3), Some(&7u32.to_ne_bytes()[..]));
        assert_eq!(find(&message.bytes, 4), None);
    }

    #[test]
    fn attributes_that_are_cut_short_are_not_read_past_their_end() {
        for bytes in [&[][..], &[9, 0], &[9, 0, 1, 0], &[0, 0, 1, 0], &[8, 0, 1, 0, 1]] {
            assert_eq!(find(bytes, 1), None, "{bytes:?}");
        }
    }
}
