//! The kernel's files about this host, its processes and its cgroups, each with one parser.
//!
//! A parser finds the fields that its caller names, in a text. So a kernel may lack other fields, a
//! caller may keep the file open, and a test may imitate it. Errors name the file.

mod cgroup;
mod links;
mod mounts;
pub mod nodes;
mod oom_score;
mod pressure;
pub mod process;
mod processors;
pub mod swaps;

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use aquifer_page::Bytes;

pub use cgroup::{Cgroup, Version};
pub use links::{LinkTraffic, link_speed, link_traffic};
pub use mounts::{Mount, mounts};
pub use nodes::Node;
pub use oom_score::{EXEMPT, end_oom_exemption, set_oom_score};
pub use pressure::{arm_trigger, pressure};
pub use processors::{ProcessorTimes, processor_times};

/// Reads a file as text.
///
/// The kernel counts anew for each read(2) of such a file, so the buffer is large enough for one.
pub fn read(path: impl AsRef<Path>) -> io::Result<String> {
    let mut text = String::with_capacity(8 << 10);
    let done = File::open(&path).and_then(|mut file| file.read_to_string(&mut text));
    done.map(|_| text).map_err(|error| {
        let path = path.as_ref().display();
        io::Error::new(error.kind(), format!("cannot read {path}: {error}"))
    })
}

/// Reads a file that holds one number; `max` is the largest.
pub fn number(path: impl AsRef<Path>) -> io::Result<u64> {
    match read(&path)?.trim() {
        "max" => Ok(u64::MAX),
        text => text.parse().map_err(|_| {
            invalid(format!("{} holds '{text}', not a number", path.as_ref().display()))
        }),
    }
}

/// Returns a size in the text of `/proc/meminfo` (proc_meminfo(5)).
pub fn memory(meminfo: &str, name: &str) -> io::Result<Bytes> {
    line("/proc/meminfo".as_ref(), meminfo, name).map(Bytes::kib)
}

/// Returns the usable RAM of this host.
pub fn total_memory() -> io::Result<Bytes> {
    memory(&read("/proc/meminfo")?, "MemTotal")
}

/// Returns the kernel's estimate of the memory that programs can allocate without swapping.
pub fn available_memory() -> io::Result<Bytes> {
    memory(&read("/proc/meminfo")?, "MemAvailable")
}

/// Returns the names and numbers in lines of `name number`, or of `name: number kB`.
pub fn fields(text: &str) -> impl Iterator<Item = (&str, u64)> {
    words(text).filter_map(|(name, word)| Some((name, word.parse().ok()?)))
}

/// Returns the number after `name` in lines as those of [`fields`].
pub fn field(text: &str, name: &str) -> Option<u64> {
    fields(text).find_map(|(found, number)| (found == name).then_some(number))
}

/// Returns the same as [`field`] of the text of `file`, or an error that names the missing line.
pub fn line(file: &Path, text: &str, name: &str) -> io::Result<u64> {
    let missing = || invalid(format!("{} has no line '{name}'", file.display()));
    field(text, name).ok_or_else(missing)
}

/// Returns the name and the first word after it of each line.
fn words(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().filter_map(|line| {
        let (name, value) = line.split_once(|c: char| c == ':' || c.is_whitespace())?;
        Some((name, value.split_whitespace().next()?))
    })
}

fn invalid(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Undoes the kernel's octal escapes of space, tab, newline and backslash in a path.
fn unescape(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(text.to_owned(), |text, (escape, character)| text.replace(escape, character))
}
