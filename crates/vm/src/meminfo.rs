//! Memory of this host, from /proc/meminfo (proc_meminfo(5)).

use std::{fs, io};

use aquifer_page::Bytes;

/// Returns the memory that programs can allocate without swapping.
pub(crate) fn available() -> io::Result<Bytes> {
    line("MemAvailable:")
}

/// Returns the usable RAM of this host.
pub(crate) fn total() -> io::Result<Bytes> {
    line("MemTotal:")
}

fn line(name: &str) -> io::Result<Bytes> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let number = line
        .and_then(|line| line.trim().strip_suffix("kB"))
        .and_then(|text| text.trim().parse().ok());
    number.map(|number: u64| Bytes(number << 10)).ok_or_else(|| io::ErrorKind::InvalidData.into())
}
