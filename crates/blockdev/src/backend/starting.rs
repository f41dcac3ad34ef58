//! The start of a driver's workers, and the wait for its device node.

use std::io;
use std::path::Path;
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use aquifer_page::WorkerId;

/// Time that the driver and the workers may take for one step of bringing the device up.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);

/// Starts `count` workers, adds them to `workers`, and waits until each has sent whether it can
/// serve.
pub(super) fn start_workers<W>(
    name: &str,
    count: usize,
    workers: &mut Vec<JoinHandle<io::Result<()>>>,
    work: impl Fn(WorkerId, Sender<io::Result<()>>) -> W,
) -> io::Result<()>
where
    W: FnOnce() -> io::Result<()> + Send + 'static,
{
    let (ready, all_ready) = mpsc::channel();
    for worker in (0..count).map(WorkerId) {
        let thread = thread::Builder::new().name(format!("{name}-{worker}"));
        workers.push(thread.spawn(work(worker, ready.clone()))?);
    }
    for _ in 0..count {
        all_ready.recv_timeout(TIMEOUT).unwrap_or_else(|error| Err(io::Error::other(error)))?;
    }
    Ok(())
}

/// Waits until the device node exists.
pub(super) fn wait_for_node(path: &Path) -> io::Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    while !path.exists() {
        if Instant::now() > deadline {
            let why = "its device node did not appear";
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
