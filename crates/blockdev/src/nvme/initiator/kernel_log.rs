//! The kernel's log messages about NVMe, read from `/dev/kmsg`.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;

use super::super::Root;

/// A reader of messages that the kernel logs after its creation. The kernel reports every refused
/// connect with one errno, but logs the reason.
#[derive(Debug)]
pub(super) struct KernelLog(Option<File>);

impl KernelLog {
    /// Starts at the end of the log. An unreadable log counts as empty, as messages only serve
    /// explanations.
    pub(super) fn from_now(root: &Root) -> Self {
        let mut options = OpenOptions::new();
        let file = options.read(true).custom_flags(libc::O_NONBLOCK).open(root.path("/dev/kmsg"));
        Self(file.ok().and_then(|mut file| file.seek(SeekFrom::End(0)).map(|_| file).ok()))
    }

    /// Returns the messages about NVMe logged since then, without time and facility.
    pub(super) fn nvme_lines(mut self) -> Vec<String> {
        let mut lines = Vec::new();
        // Each read returns one record; no record is longer.
        let mut record = [0; 8192];
        while let Some(file) = &mut self.0 {
            match file.read(&mut record) {
                Ok(length) if length > 0 => {
                    let text = String::from_utf8_lossy(&record[..length]);
                    lines.extend(
                        message(&text).filter(|text| text.starts_with("nvme")).map(str::to_owned),
                    );
                }
                // The kernel overwrote unread records with newer ones.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
                _ => break,
            }
        }
        lines
    }
}

/// Returns the message of a record: `priority,sequence,time,flags;message`, then lines of
/// properties.
fn message(record: &str) -> Option<&str> {
    record.split_once(';')?.1.lines().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_its_message() {
        let record = "3,1,2,-;nvme nvme0: failed to connect queue: 0 ret=16770\n \
                      SUBSYSTEM=nvme\n DEVICE=c1:2\n";
        assert_eq!(message(record), Some("nvme nvme0: failed to connect queue: 0 ret=16770"));
    }
}
