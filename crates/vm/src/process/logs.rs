//! Bounds for the files to which QEMU writes: the guest decides how much it prints on its serial
//! port.

use std::fs::{self, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::files::Files;

/// Largest size of a log, in bytes, before its end moves to the file beside it.
const MOST: u64 = 1 << 20;

/// How often the sizes are checked. A guest prints about a megabyte in this time at most.
const PERIOD: Duration = Duration::from_secs(1);

/// Keeps a VM's logs within bounds until it is dropped.
#[derive(Debug)]
pub(super) struct Bounding {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Bounding {
    /// Starts the thread that checks the console's log and QEMU's.
    pub(super) fn start(files: &Files) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let logs = [files.console(), files.log()];
        let look = move || {
            while stopped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                for log in &logs {
                    if let Err(error) = turn_over(log) {
                        tracing::warn!("cannot bound the size of {}: {error}", log.display());
                    }
                }
            }
        };
        let thread = thread::Builder::new().name("logs".to_owned()).spawn(look)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Bounding {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has ended as well.
            let _ = thread.join();
        }
    }
}

/// Returns the path to which the end of a full log moves.
fn older(log: &Path) -> PathBuf {
    let mut older = log.as_os_str().to_owned();
    older.push(".1");
    older.into()
}

/// Moves the end of a full log to the file beside it. QEMU appends, so it continues at the start of
/// the emptied log.
fn turn_over(log: &Path) -> io::Result<()> {
    let length = match fs::metadata(log) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?.len(),
    };
    if length <= MOST {
        return Ok(());
    }
    let mut file = OpenOptions::new().read(true).write(true).open(log)?;
    file.seek(SeekFrom::Start(length - MOST))?;
    let mut end = Vec::new();
    // Read lines that arrive meanwhile too, but a bounded number of bytes.
    (&file).take(2 * MOST).read_to_end(&mut end)?;
    fs::write(older(log), end)?;
    file.set_len(0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_guest_that_talks_without_end_takes_a_bounded_log() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("console.log");
        turn_over(&log).unwrap();
        let mut guest = OpenOptions::new().create(true).append(true).open(&log).unwrap();
        let line = [b'x'; 99];
        for number in 0..60_000 {
            writeln!(guest, "{number} {}", String::from_utf8_lossy(&line)).unwrap();
            if number % 5_000 == 0 {
                turn_over(&log).unwrap();
            }
        }
        turn_over(&log).unwrap();
        let [now, before] = [&log, &older(&log)].map(|path| fs::read_to_string(path).unwrap());
        assert!(
            now.len() + before.len() <= 3 * MOST as usize,
            "{} and {}",
            now.len(),
            before.len()
        );
        let said = before + &now;
        assert!(said.lines().last().unwrap().starts_with("59999 "), "the latest is kept");
        let numbers = said
            .lines()
            .skip(1)
            .map(|line| line.split(' ').next().unwrap().parse::<u32>().unwrap());
        assert!(numbers.collect::<Vec<_>>().windows(2).all(|two| two[1] == two[0] + 1), "in order");
    }

    #[test]
    fn the_logs_of_a_vm_are_looked_at_until_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::new(dir.path(), &"one".parse().unwrap());
        fs::create_dir_all(files.console().parent().unwrap()).unwrap();
        fs::write(files.console(), vec![b'x'; 2 * MOST as usize]).unwrap();
        let bounding = Bounding::start(&files).unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while fs::metadata(files.console()).unwrap().len() > 0 {
            assert!(std::time::Instant::now() < deadline, "the log is never checked");
            thread::sleep(Duration::from_millis(10));
        }
        drop(bounding);
        assert_eq!(fs::metadata(older(&files.console())).unwrap().len(), MOST);
    }
}
