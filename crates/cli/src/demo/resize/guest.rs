//! The first process of the demo's guest: it holds as much memory as it is told to, and checks what it holds.

use std::ffi::CString;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::process::{Command, Stdio};

use aquifer_guest::initrd::ORDER;
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};
use rustix::system::finit_module;
use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};

/// The word that begins what it says; after it come MiB that it holds, chunks that were not what they must be, and errors of its kernel.
pub(super) const HOLDS: &str = "holds";

/// The agent, where the guest has it.
pub(super) const AGENT: &str = "/bin/aquifer-guest";

const CHUNK: usize = 1 << 20;

/// What is worse than a warning, of the kernel's log levels (syslog(2)).
const ERROR: u32 = 3;

/// Does what it is told on its standard input, for ever: a number of MiB a line.
///
/// # Errors
/// If it cannot begin, or say anything any more.
pub fn run() -> io::Result<()> {
    for (kind, path) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/run")] {
        fs::create_dir_all(path)?;
        mount(kind, path, kind, MountFlags::empty(), None)?;
    }
    for line in fs::read_to_string(ORDER)?.lines() {
        load(line)?;
    }
    Command::new(AGENT).arg("run").stdin(Stdio::null()).spawn()?;
    let stdin = io::stdin();
    // What it is told is not to be said again by the terminal.
    if let Ok(mut mode) = tcgetattr(&stdin) {
        mode.local_modes.remove(LocalModes::ECHO);
        tcsetattr(&stdin, OptionalActions::Now, &mode)?;
    }
    let mut held: Vec<Vec<u64>> = Vec::new();
    say(&held)?;
    for line in stdin.lines() {
        let Ok(mib) = line?.trim().parse::<usize>() else { continue };
        held.truncate(mib);
        while held.len() < mib {
            held.push(chunk(held.len()));
        }
        say(&held)?;
    }
    Ok(())
}

/// Loads a module, given as its file and its parameters.
fn load(line: &str) -> io::Result<()> {
    let (file, parameters) = line.split_once(' ').unwrap_or((line, ""));
    let module = fs::File::open(format!("/modules/{file}"))?;
    match finit_module(module, &CString::new(parameters)?, 0) {
        Err(Errno::EXIST) => Ok(()),
        loaded => Ok(loaded?),
    }
}

/// What the chunk of this number must be.
fn chunk(number: usize) -> Vec<u64> {
    let first = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..CHUNK as u64 / 8).map(|word| first.wrapping_add(word)).collect()
}

fn say(held: &[Vec<u64>]) -> io::Result<()> {
    let is_wrong = |(number, held): &(usize, &Vec<u64>)| {
        let first = held.first().copied().unwrap_or_default();
        first != (*number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
            || held.iter().zip(0..).any(|(word, at)| *word != first.wrapping_add(at))
    };
    let wrong = held.iter().enumerate().filter(is_wrong).count();
    let mut out = io::stdout().lock();
    writeln!(out, "{HOLDS} {} {wrong} {}", held.len(), kernel_errors()?)?;
    out.flush()
}

/// Errors in the kernel's log. (Each record begins with a number: its level in the lowest three bits.)
fn kernel_errors() -> io::Result<usize> {
    use std::io::Read as _;
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let mut log = fs::OpenOptions::new().read(true).custom_flags(nonblocking).open("/dev/kmsg")?;
    let (mut errors, mut record) = (0, [0; 8192]);
    loop {
        match log.read(&mut record) {
            Ok(length) => {
                let text = String::from_utf8_lossy(&record[..length]);
                let number = text.split(',').next().and_then(|number| number.parse::<u32>().ok());
                errors += usize::from(number.is_some_and(|number| number & 7 <= ERROR));
            }
            // What was overwritten before it was read.
            Err(error) if error.raw_os_error() == Some(Errno::PIPE.raw_os_error()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(errors),
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_chunks_are_alike() {
        assert_ne!(chunk(0), chunk(1));
        assert_eq!(chunk(3).len() * 8, CHUNK);
    }
}
