//! What testbed and guest say to each other: frames over a byte stream.
//!
//! A frame is the length of its data (4 bytes), the process it is about (4 bytes), its kind (1 byte), and the data; numbers
//! are little-endian. Processes are numbered by who starts them. The same frames carry `testbed exec`.

use std::io::{self, Read, Write};

/// The name of the virtio port that carries them.
pub const PORT: &str = "aquifer.testbed";

/// The most data that a frame carries: enough for speed, little for a guest that is short of memory.
pub const CHUNK: usize = 64 << 10;

const HEADER: usize = 9;

/// What a frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The guest is up (process 0).
    Ready,
    /// Starts a shell command: the data.
    Start,
    /// Data for its standard input.
    Input,
    /// Its standard input ends.
    InputEnd,
    /// A signal for its process group: its number, one byte.
    Signal,
    /// It has written to standard output.
    Output,
    /// It has written to standard error.
    Error,
    /// It has ended: the exit code, or 128 and the signal, 4 bytes.
    Exit,
    /// It could not be run: the data says why.
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
    /// The process that it is about.
    pub process: u32,
    /// What it says.
    pub kind: Kind,
    /// Depends on the kind.
    pub data: Vec<u8>,
}

impl Frame {
    /// A frame about `process`.
    pub fn new(process: u32, kind: Kind, data: impl Into<Vec<u8>>) -> Self {
        Self { process, kind, data: data.into() }
    }

    /// Writes it in one piece, so that it is never mixed with another.
    ///
    /// # Errors
    /// If the stream refuses it, or the data is longer than [`CHUNK`].
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

    /// The next frame of a stream.
    ///
    /// # Errors
    /// If the stream ends or breaks, or what comes is no frame.
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

    /// The exit code in the data of [`Kind::Exit`].
    pub fn exit_code(&self) -> i32 {
        self.data.as_slice().try_into().map_or(-1, i32::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_is_received_in_order() {
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
    fn what_is_no_frame_is_refused() {
        let too_long = Frame::new(1, Kind::Input, vec![0; CHUNK + 1]);
        assert!(too_long.send(Vec::new()).is_err());
        assert!(Frame::receive(&[0, 0, 0, 0, 1, 0, 0, 0, 200][..]).is_err());
        assert!(Frame::receive(&[0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0, 1][..]).is_err());
    }
}
