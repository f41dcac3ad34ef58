//! Messages between testbed and guest: frames over a byte stream.
//!
//! A frame is the length of its data (4 bytes), its process (4 bytes), its kind (1 byte), and the
//! data; numbers are little-endian. The side that starts a process numbers it. `testbed exec` uses
//! the same frames.

use std::io::{self, Read, Write};

/// Name of the virtio port that carries frames.
pub const PORT: &str = "aquifer.testbed";

/// The most data in a frame, in bytes: enough for speed, little for a guest that is short of
/// memory.
pub const CHUNK: usize = 64 << 10;

const HEADER: usize = 9;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The guest is up (process 0).
    Ready,
    /// Order to start a shell command; the data is the command.
    Start,
    /// Data for the command's standard input.
    Input,
    /// End of the command's standard input.
    InputEnd,
    /// Signal for the command's process group; the data is its number, one byte.
    Signal,
    /// Data from the command's standard output.
    Output,
    /// Data from the command's standard error.
    Error,
    /// End of the command; the data is its exit code, or 128 plus the signal, 4 bytes.
    Exit,
    /// Failure to run the command; the data says why.
    Failed,
}

const KINDS: [Kind; 9] = [
    Kind::Ready,
    Kind::Start,
    Kind::Input,
    Kind::InputEnd,
    Kind::Signal,
    Kind::Output,
    Kind::Error,
    Kind::Exit,
    Kind::Failed,
];

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Number of the process that the frame is about.
    pub process: u32,
    /// The kind.
    pub kind: Kind,
    /// The data; its meaning depends on the kind.
    pub data: Vec<u8>,
}

impl Frame {
    /// Creates a frame about `process`.
    pub fn new(process: u32, kind: Kind, data: impl Into<Vec<u8>>) -> Self {
        Self { process, kind, data: data.into() }
    }

    /// Writes the frame in one piece, so that it never mixes with another.
    ///
    /// # Errors
    /// If the stream fails, or the data is longer than [`CHUNK`].
    pub fn send(&self, mut stream: impl Write) -> io::Result<()> {
        if self.data.len() > CHUNK {
            return Err(io::Error::other(format!(
                "{} bytes are too many for a frame",
                self.data.len()
            )));
        }
        let mut bytes = Vec::with_capacity(HEADER + self.data.len());
        bytes.extend_from_slice(&u32::try_from(self.data.len()).unwrap_or(u32::MAX).to_le_bytes());
        bytes.extend_from_slice(&self.process.to_le_bytes());
        bytes.push(self.kind as u8);
        bytes.extend_from_slice(&self.data);
        stream.write_all(&bytes)
    }

    /// Reads the next frame of a stream.
    ///
    /// # Errors
    /// If the stream ends or fails, or its bytes are no frame.
    pub fn receive(mut stream: impl Read) -> io::Result<Self> {
        let mut header = [0; HEADER];
        stream.read_exact(&mut header)?;
        let number = |at: usize| {
            u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        let kind = KINDS.get(usize::from(header[8]));
        let len = number(0) as usize;
        let (Some(&kind), true) = (kind, len <= CHUNK) else {
            return Err(io::Error::other(format!("no frame: {header:?}")));
        };
        let mut data = vec![0; len];
        stream.read_exact(&mut data)?;
        Ok(Self { process: number(4), kind, data })
    }

    /// Returns the exit code in the data of [`Kind::Exit`]; -1 if the data is malformed.
    pub fn exit_code(&self) -> i32 {
        self.data.as_slice().try_into().map_or(-1, i32::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_received_in_the_order_sent() {
        let mut stream = Vec::new();
        let frames: Vec<_> = KINDS
            .iter()
            .zip(0..)
            .map(|(&kind, process)| Frame::new(process, kind, vec![7; process as usize]))
            .collect();
        frames.iter().for_each(|frame| frame.send(&mut stream).unwrap());
        let mut rest = stream.as_slice();
        for frame in frames {
            assert_eq!(Frame::receive(&mut rest).unwrap(), frame);
        }
        assert!(Frame::receive(&mut rest).is_err());
    }

    #[test]
    fn invalid_frames_are_refused() {
        let too_long = Frame::new(1, Kind::Input, vec![0; CHUNK + 1]);
        assert!(too_long.send(Vec::new()).is_err());
        assert!(Frame::receive(&[0, 0, 0, 0, 1, 0, 0, 0, 200][..]).is_err());
        assert!(Frame::receive(&[0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0, 1][..]).is_err());
    }
}
