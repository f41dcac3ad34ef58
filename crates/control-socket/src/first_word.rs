//! The first word of a long-running process to its starter: one line with one JSON object, on its
//! standard output.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write as _};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// How long a process may take until it serves. It reads all records, and lenders may not answer.
pub const TIMEOUT: Duration = Duration::from_secs(300);

/// Writes the word.
///
/// # Errors
/// The starter is gone.
pub fn say(word: &impl Serialize) -> io::Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, word)?;
    out.write_all(b"\n")?;
    out.flush()
}

/// Closes the pipe to the starter: standard output goes to standard error from now on.
///
/// # Errors
/// The system's.
pub fn is_said() -> io::Result<()> {
    Ok(rustix::stdio::dup2_stdout(io::stderr())?)
}

/// Opens a log that only its owner may read, and appends to it.
///
/// # Errors
/// The system's, with the path.
pub fn open_log(path: &Path) -> io::Result<File> {
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(path);
    log.map_err(|error| {
        let why = format!("cannot open the log {}: {error}", path.display());
        io::Error::new(error.kind(), why)
    })
}

/// Starts a process whose word [`heard`] waits for. Its standard error goes to the log.
///
/// # Errors
/// The system's.
pub fn spawn(command: &mut Command, log: &Path) -> io::Result<Child> {
    command.stdout(Stdio::piped()).stderr(open_log(log)?).spawn()
}

/// Waits for the word of a process with a pipe as standard output. Returns `None` if the process
/// ended without one.
///
/// # Errors
/// The system's. `TimedOut` if the process is silent for so long; this function then kills it, with
/// its process group if it leads one.
pub fn heard<T: DeserializeOwned>(child: &mut Child, timeout: Duration) -> io::Result<Option<T>> {
    let output = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
    let line = read_line(output, Instant::now() + timeout).inspect_err(|_| {
        // An error means that the process leads no group, or has ended.
        let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
        let _ = child.kill();
        let _ = child.wait();
    })?;
    Ok(serde_json::from_slice(&line).ok())
}

/// Reads up to the end of the first line, or of the stream.
fn read_line(mut from: impl Read + AsFd, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&from, PollFlags::IN)], Some(&left)) {
            Ok(0) => {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the process does not report whether it serves",
                ));
            }
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        let mut some = [0; 4096];
        let read = from.read(&mut some)?;
        line.extend(&some[..read]);
        if read == 0 || line.contains(&b'\n') {
            return Ok(line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(script: &str) -> Child {
        Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap()
    }

    #[test]
    fn a_word_in_pieces_and_the_end_without_one_are_heard() {
        let mut child = start("printf 4; sleep 0.1; echo 2; exec sleep 60");
        assert_eq!(heard::<u32>(&mut child, TIMEOUT).unwrap(), Some(42));
        child.kill().unwrap();
        child.wait().unwrap();
        let mut child = start("exit 0");
        assert_eq!(heard::<u32>(&mut child, TIMEOUT).unwrap(), None);
        child.wait().unwrap();
    }

    #[test]
    fn a_process_that_says_nothing_is_given_up_and_ended() {
        let mut child = start("exec sleep 600");
        let error = heard::<u32>(&mut child, Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(!child.wait().unwrap().success());
    }
}
