//! The files of a process in `/proc/PID` (proc(5)).

use std::fs;
use std::io;
use std::ops::Range;

use aquifer_page::Bytes;
use rustix::fs::makedev;
use rustix::param::clock_ticks_per_second;

use crate::{field, words};

/// A mapping of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Its addresses.
    pub addresses: Range<u64>,
    /// The device and the inode of the mapped file.
    pub file: (u64, u64),
}

/// Reads a file of a process.
pub fn read(pid: u32, file: &str) -> io::Result<String> {
    fs::read_to_string(format!("/proc/{pid}/{file}"))
}

/// Returns the kernel's name of a process; empty if the process is gone.
pub fn name(pid: u32) -> String {
    read(pid, "comm").unwrap_or_default().trim().to_owned()
}

/// Returns when a process started, in clock ticks since boot. Another process may reuse its id.
pub fn started(pid: u32) -> Option<u64> {
    stat(pid, 22)
}

/// Returns the CPU time of a process, user and system, in seconds.
pub fn cpu_seconds(pid: u32) -> f64 {
    let ticks: u64 = [14, 15].into_iter().filter_map(|field| stat(pid, field)).sum();
    ticks as f64 / clock_ticks_per_second() as f64
}

/// Returns a number in proc_pid_stat(5), whose fields count from 1. Field 2 is a name with
/// arbitrary characters, and ends with the last bracket.
fn stat(pid: u32, number: usize) -> Option<u64> {
    let stat = read(pid, "stat").ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(number - 3)?.parse().ok()
}

/// Returns a size in proc_pid_status(5), as `VmRSS`; zero if the process is gone.
pub fn size(pid: u32, name: &str) -> Bytes {
    let status = read(pid, "status").unwrap_or_default();
    field(&status, name).map(Bytes::kib).unwrap_or_default()
}

/// Returns the signals that this process ignores: bit N-1 is signal N.
pub fn ignored_signals() -> io::Result<u64> {
    let status = read(std::process::id(), "status")?;
    let mask = words(&status).find_map(|(name, mask)| (name == "SigIgn").then_some(mask));
    Ok(mask.and_then(|mask| u64::from_str_radix(mask, 16).ok()).unwrap_or(0))
}

/// Returns the mappings in a text like proc_pid_maps(5).
pub fn mappings(text: &str) -> impl Iterator<Item = Mapping> {
    text.lines().filter_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let (major, minor) = fields.nth(2)?.split_once(':')?;
        let hex = |digits| u64::from_str_radix(digits, 16).ok();
        let device = makedev(hex(major)? as u32, hex(minor)? as u32);
        let file = (device, fields.next()?.parse().ok()?);
        Some(Mapping { addresses: hex(start)?..hex(end)?, file })
    })
}
