//! What a guest and its host say to each other, over the virtio-serial port [`PORT`].
//!
//! One JSON object a line, told apart by its field `say`. Each side sends an empty line first, and skips what it does not understand:
//! a port may begin in the middle of a line after one of them was away, and either may be newer than the other.

use std::io;
use std::marker::PhantomData;

use aquifer_page::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The port's name, on both sides of the machine: QEMU's `virtserialport,name=` and `/dev/virtio-ports/` in the guest.
pub const PORT: &str = "org.aquifer.guest.0";

/// The version of the protocol that this is.
pub const VERSION: u32 = 1;

/// Bytes in the longest line, its end included; longer ones are skipped.
pub const LONGEST: usize = 64 << 10;

/// What a guest says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum ToHost {
    /// The first word, and again whenever the host sends an empty line, as that may be another one, which has not heard it.
    Hello {
        /// Its [`VERSION`].
        version: u32,
        /// Its kernel's release, as `uname -r` has it.
        kernel: String,
    },
    /// Its figures, each period that [`ToGuest::Watch`] asks for.
    Report(Report),
    /// The answer to [`ToGuest::Check`].
    Checked {
        /// The question's.
        id: u64,
        /// Its figures, once what could be brought online was.
        report: Report,
    },
    /// It asks to be resized (Bielski et al. 2018, section III-C); the host answers by [`ToGuest::Answer`].
    Request {
        /// The guest's number for this; none is used twice while the guest runs.
        id: u64,
        /// Bytes that it wants more, or if negative, gives back.
        bytes: i64,
        /// Whether it is near out-of-memory, rather than ahead of its need: reactive, in the paper's words, not pro-active.
        urgent: bool,
        /// For how long, in ms, whoever asks waits for the answer.
        patience_ms: u64,
        /// What for, in words for the log.
        why: String,
    },
    /// The answer to [`ToGuest::Trace`], to which there are no times yet the first time.
    Stages {
        /// The question's.
        id: u64,
        /// Those that something was seen of.
        stages: Vec<Stage>,
        /// Names of those that this guest's kernel does not show, or not all of.
        missing: Vec<String>,
    },
}

/// What a host says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum ToGuest {
    /// What the guest is to look after by itself. A guest that was not told looks only after pressure (PSI).
    Watch {
        /// A report each so many ms; none if zero.
        period_ms: u64,
        /// The available memory under which the guest is near out-of-memory.
        urgent_below: Bytes,
    },
    /// It is to say what it has as soon as its kernel counts as much memory as that, or after a while that it does not. Memory that the kernel leaves
    /// offline is brought online meanwhile.
    Check {
        /// The host's number for this.
        id: u64,
        /// What `total` of [`Report`] is to be at least.
        #[serde(default)]
        total: Bytes,
    },
    /// It is to say what the stages of resizes took since it was told this before, and to go on measuring, or to stop.
    Trace {
        /// The host's number for this.
        id: u64,
        /// Whether to go on.
        on: bool,
    },
    /// What comes of a [`ToHost::Request`].
    Answer {
        /// The request's.
        id: u64,
        /// Bytes by which the guest is larger now, or if negative, smaller.
        granted: i64,
        /// What the guest has now.
        size: Bytes,
        /// What is missing of what was asked for.
        missing: Bytes,
        /// Why it is missing.
        why: Option<String>,
    },
}

/// A guest's figures.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// What its kernel has to give (`MemTotal` of proc_meminfo(5)).
    pub total: Bytes,
    /// What programs could still have without swapping (`MemAvailable`).
    pub available: Bytes,
    /// What nothing uses (`MemFree`).
    pub free: Bytes,
    /// Its swap.
    pub swap_total: Bytes,
    /// What of its swap is used.
    pub swap_used: Bytes,
    /// Bytes that came from swap since it was started (`pswpin` of `/proc/vmstat`).
    pub swap_in: u64,
    /// Bytes that went to swap since then (`pswpout`).
    pub swap_out: u64,
    /// The share of the last 10 s, in percent, for which some task waited for memory (kernel's accounting/psi.rst); `None` without PSI.
    pub pressure_some: Option<f64>,
    /// The same for all tasks at once.
    pub pressure_full: Option<f64>,
    /// For how long, in µs, some task has waited for memory since the guest was started.
    pub stalled_us: Option<u64>,
    /// Processes that its kernel has killed for their memory since then.
    pub oom_kills: u64,
    /// Its memory blocks that are online, whether or not virtio-mem has plugged all of each (kernel's admin-guide/mm/memory-hotplug.rst).
    pub online: Bytes,
    /// Those that are there and not online: what nobody can use, though virtio-mem counts it.
    pub offline: Bytes,
    /// The size of a memory block.
    pub block: Bytes,
}

/// A stage of resizes (Bielski et al. 2018, Table I).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    /// Its name.
    pub name: String,
    /// What it took in all, in µs.
    pub took_us: f64,
    /// How often it was done.
    pub count: u32,
}

/// A message as a line, with its end.
///
/// # Errors
/// If it is longer than [`LONGEST`].
pub fn encode(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    if line.len() > LONGEST {
        let what = format!("a message of {} bytes; the longest may have {LONGEST}", line.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    Ok(line)
}

/// Makes messages of what comes, in whatever pieces.
#[derive(Debug)]
pub struct Decoder<T> {
    line: Vec<u8>,
    /// The line is too long, and is skipped up to its end.
    skipping: bool,
    message: PhantomData<fn() -> T>,
}

/// What a line is.
#[derive(Clone, Debug, PartialEq)]
pub enum Line<T> {
    /// A message.
    Message(T),
    /// Nothing: whoever is at the other end starts from the beginning.
    Empty,
}

impl<T> Default for Decoder<T> {
    fn default() -> Self {
        Self { line: Vec::new(), skipping: false, message: PhantomData }
    }
}

impl<T: DeserializeOwned> Decoder<T> {
    /// One that expects the beginning of a line.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes `bytes` and hands each line that they complete to `each`, but for those that are no messages.
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
        let report =
            Report { total: Bytes::gib(1), pressure_some: Some(1.25), ..Report::default() };
        for message in [
            ToHost::Hello { version: VERSION, kernel: "6.12".to_owned() },
            ToHost::Report(report.clone()),
            ToHost::Checked { id: 1, report },
            ToHost::Request {
                id: 2,
                bytes: -(1 << 29),
                urgent: false,
                patience_ms: 10_000,
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
        let line = "{\"say\":\"answer\",\"id\":7,\"granted\":1048576,\"size\":1073741824,\"missing\":0,\"why\":null}\n";
        assert_eq!(String::from_utf8(encode(&answer).unwrap()).unwrap(), line);
        assert_eq!(decode(&[line.as_bytes()]), [Line::Message(answer)]);
    }

    #[test]
    fn fields_of_a_newer_side_do_no_harm_and_those_that_an_older_one_lacks_are_zero() {
        let line = b"{\"say\":\"report\",\"total\":4096,\"colour\":\"blue\"}\n";
        let report = Report { total: Bytes(4096), ..Report::default() };
        assert_eq!(decode(&[line]), [Line::Message(ToHost::Report(report))]);
    }

    #[test]
    fn a_conversation_that_begins_in_the_middle_of_a_line_goes_on_with_the_next() {
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
