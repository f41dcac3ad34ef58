//! The protocol of a guest and its host over the virtio-serial port [`PORT`].
//!
//! Each line is one JSON object, whose field `say` names the message. Each side sends an empty line
//! first, and skips unknown lines. A port may start in the middle of a line after one side was
//! away, and either side may be newer than the other.

use std::io;
use std::marker::PhantomData;

use aquifer_page::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The port's name: QEMU's `virtserialport,name=`, and the name under `/dev/virtio-ports/` in the
/// guest.
pub const PORT: &str = "org.aquifer.guest.0";

/// Version of this protocol.
pub const VERSION: u32 = 1;

/// Length of the longest line in bytes, including its end; longer lines are skipped.
pub const LONGEST: usize = 64 << 10;

/// A message of the guest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum ToHost {
    /// The first message, repeated after each empty line of the host: that may come from another
    /// host.
    Hello {
        /// The agent's [`VERSION`].
        version: u32,
        /// The kernel's release, as `uname -r` prints it.
        kernel: String,
    },
    /// The guest's figures, once each period of [`ToGuest::Watch`].
    Report(GuestReport),
    /// The answer to [`ToGuest::Check`].
    Checked {
        /// Number of the check.
        id: u64,
        /// The guest's figures, after it has brought memory online where that was needed.
        report: GuestReport,
    },
    /// A request to be resized (\[Bielski18\], section III-C); the host answers with
    /// [`ToGuest::Answer`].
    Request {
        /// Number of the request, unique while the guest runs.
        id: u64,
        /// Bytes to grow by or, if negative, to shrink by.
        bytes: i64,
        /// Whether the guest is near out-of-memory ("reactive" in the paper); otherwise the request
        /// is ahead of the need ("pro-active").
        urgent: bool,
        /// How long the guest waits for the answer, in ms.
        timeout_ms: u64,
        /// The purpose, for the host's log.
        why: String,
    },
    /// The answer to [`ToGuest::Trace`]. The first answer holds no times.
    Stages {
        /// Number of the question.
        id: u64,
        /// The stages that occurred.
        stages: Vec<Stage>,
        /// Names of the stages that the guest's kernel does not show, or not completely.
        missing: Vec<String>,
    },
}

/// A message of the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum ToGuest {
    /// Orders the guest to watch its memory. A guest without this order watches only pressure
    /// (PSI).
    Watch {
        /// Period of the reports in ms; zero for none.
        period_ms: u64,
        /// Available memory below which the guest is near out-of-memory.
        urgent_below: Bytes,
    },
    /// Asks for the guest's figures once its kernel counts `total`, or after a timeout. Meanwhile
    /// the guest brings offline memory online.
    Check {
        /// Number of the check.
        id: u64,
        /// The least value of [`GuestReport`]'s `total` to wait for.
        #[serde(default)]
        total: Bytes,
    },
    /// Asks for the times of the stages since the last such question, and starts, continues or
    /// stops the measurement.
    Trace {
        /// Number of the question.
        id: u64,
        /// Whether to go on measuring.
        on: bool,
    },
    /// The answer to a [`ToHost::Request`].
    Answer {
        /// Number of the request.
        id: u64,
        /// Bytes by which the guest has grown or, if negative, shrunk.
        granted: i64,
        /// The guest's size after the request.
        size: Bytes,
        /// The part of the request that was not granted.
        missing: Bytes,
        /// Why that part is missing.
        why: Option<String>,
    },
}

/// A guest's figures.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestReport {
    /// Memory that the kernel manages (`MemTotal` of proc_meminfo(5)).
    pub total: Bytes,
    /// Memory that programs can still allocate without swapping (`MemAvailable`).
    pub available: Bytes,
    /// Unused memory (`MemFree`).
    pub free: Bytes,
    /// Size of the swap space (`SwapTotal`).
    pub swap_total: Bytes,
    /// Used swap space.
    pub swap_used: Bytes,
    /// Bytes read from swap since boot (`pswpin` of `/proc/vmstat`, in bytes).
    pub swap_in: u64,
    /// Bytes written to swap since boot (`pswpout`, in bytes).
    pub swap_out: u64,
    /// How tasks stall for memory.
    #[serde(flatten)]
    pub stalls: Stalls,
    /// Processes that the out-of-memory killer has killed since boot.
    pub oom_kills: u64,
    /// The memory blocks.
    #[serde(flatten)]
    pub blocks: BlockSizes,
}

/// How tasks stall for memory (PSI: kernel's accounting/psi.rst). All are `None` without PSI.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stalls {
    /// Percent of the last 10 s in which some task stalled for memory.
    pub pressure_some: Option<f64>,
    /// Percent of the last 10 s in which all tasks stalled for memory at once.
    pub pressure_full: Option<f64>,
    /// Time since boot in which some task stalled for memory, in µs.
    pub stalled_us: Option<u64>,
}

/// The sizes of all online and all offline memory blocks, and of one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BlockSizes {
    /// Memory in online blocks, whether or not virtio-mem has plugged all of each (kernel's
    /// admin-guide/mm/memory-hotplug.rst).
    pub online: Bytes,
    /// Memory in offline blocks: unusable, though virtio-mem counts it.
    pub offline: Bytes,
    /// Size of a memory block.
    pub block: Bytes,
}

/// A stage of resizes (\[Bielski18\], Table I).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    /// Name of the stage.
    pub name: String,
    /// Total time of the stage, in µs.
    pub took_us: f64,
    /// How often the stage occurred.
    pub count: u32,
}

/// Encodes a message as a line, including its end.
///
/// # Errors
/// If the line is longer than [`LONGEST`].
pub fn encode(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    if line.len() > LONGEST {
        let what = format!("a message of {} bytes exceeds the limit of {LONGEST}", line.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    Ok(line)
}

/// A decoder of lines that arrive in pieces of any size.
#[derive(Debug)]
pub struct Decoder<T> {
    line: Vec<u8>,
    /// Whether the current line is too long, and is skipped up to its end.
    skipping: bool,
    message: PhantomData<fn() -> T>,
}

/// A decoded line.
#[derive(Clone, Debug, PartialEq)]
pub enum Line<T> {
    /// A message.
    Message(T),
    /// An empty line: the peer starts afresh.
    Empty,
}

impl<T> Default for Decoder<T> {
    fn default() -> Self {
        Self { line: Vec::new(), skipping: false, message: PhantomData }
    }
}

impl<T: DeserializeOwned> Decoder<T> {
    /// Makes a decoder that expects the beginning of a line.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes `bytes` and hands each completed line to `each`, except lines that are no messages.
    pub fn take(&mut self, bytes: &[u8], mut each: impl FnMut(Line<T>)) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let (text, ends) = match piece.split_last() {
                Some((b'\n', text)) => (text, true),
                _ => (piece, false),
            };
            self.skipping |= self.line.len() + text.len() >= LONGEST;
            if !self.skipping {
                self.line.extend_from_slice(text);
            }
            if !ends {
                continue;
            }
            if !self.skipping {
                let line = self.line.trim_ascii();
                if line.is_empty() {
                    each(Line::Empty);
                } else if let Ok(message) = serde_json::from_slice(line) {
                    each(Line::Message(message));
                }
            }
            self.line.clear();
            self.skipping = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode<T: DeserializeOwned>(pieces: &[&[u8]]) -> Vec<Line<T>> {
        let mut decoder = Decoder::new();
        let mut lines = Vec::new();
        for piece in pieces {
            decoder.take(piece, |line| lines.push(line));
        }
        lines
    }

    #[test]
    fn every_message_of_a_guest_is_read_as_it_was_written() {
        let stalls = Stalls { pressure_some: Some(1.25), ..Stalls::default() };
        let report = GuestReport { total: Bytes::gib(1), stalls, ..GuestReport::default() };
        for message in [
            ToHost::Hello { version: VERSION, kernel: "6.12".to_owned() },
            ToHost::Report(report.clone()),
            ToHost::Checked { id: 1, report },
            ToHost::Request {
                id: 2,
                bytes: -(1 << 29),
                urgent: false,
                timeout_ms: 10_000,
                why: "done".to_owned(),
            },
            ToHost::Stages {
                id: 3,
                stages: vec![Stage {
                    name: "section_init".to_owned(),
                    took_us: 32_472.0,
                    count: 4,
                }],
                missing: vec!["section_clean_up".to_owned()],
            },
        ] {
            assert_eq!(decode(&[&encode(&message).unwrap()]), [Line::Message(message)]);
        }
    }

    #[test]
    fn a_message_of_a_host_looks_like_this_on_the_wire() {
        let answer = ToGuest::Answer {
            id: 7,
            granted: 1 << 20,
            size: Bytes::gib(1),
            missing: Bytes(0),
            why: None,
        };
        let line = "{\"say\":\"answer\",\"id\":7,\"granted\":1048576,\"size\":1073741824,\
                    \"missing\":0,\"why\":null}\n";
        assert_eq!(String::from_utf8(encode(&answer).unwrap()).unwrap(), line);
        assert_eq!(decode(&[line.as_bytes()]), [Line::Message(answer)]);
    }

    #[test]
    fn unknown_fields_are_ignored_and_missing_ones_are_zero() {
        let line = b"{\"say\":\"report\",\"total\":4096,\"colour\":\"blue\"}\n";
        let report = GuestReport { total: Bytes(4096), ..GuestReport::default() };
        assert_eq!(decode(&[line]), [Line::Message(ToHost::Report(report))]);
    }

    #[test]
    fn a_decoder_that_starts_within_a_line_goes_on_with_the_next() {
        let check = ToGuest::Check { id: 1, total: Bytes::ZERO };
        let text = [
            b"iod_ms\":1000}\n\n{\"say\":\"dance\"}\n".as_slice(),
            &encode(&check).unwrap(),
            b"\xff\n{\"say\":\"che",
        ]
        .concat();
        for size in [1, 2, 7, text.len()] {
            let pieces: Vec<_> = text.chunks(size).collect();
            assert_eq!(
                decode(&pieces),
                [Line::Empty, Line::Message(check.clone())],
                "in pieces of {size}"
            );
        }
    }

    #[test]
    fn a_line_that_is_too_long_is_skipped_and_takes_no_memory() {
        let check = ToGuest::Check { id: 1, total: Bytes::ZERO };
        let mut decoder = Decoder::new();
        let mut lines = Vec::new();
        for _ in 0..100 {
            decoder.take(&[b'x'; 4096], |line| lines.push(line));
            assert!(decoder.line.capacity() <= 2 * LONGEST);
        }
        decoder.take(b"\n", |line| lines.push(line));
        decoder.take(&encode(&check).unwrap(), |line| lines.push(line));
        assert_eq!(lines, [Line::Message(check)]);
        assert!(encode(&"x".repeat(LONGEST)).is_err());
    }
}
