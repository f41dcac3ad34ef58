//! The thread of an admin queue, which sleeps, sends Keep Alives, and notices the end of the
//! controller.

use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use aquifer_transport::initiating::{Deadline, Failure as _};

use super::Failure;
use super::controller::Queues;
use super::execute::Executor;
use super::link::Link;

/// Size of its stack in bytes: small, as it is locked memory in processes on the swap path.
const STACK: usize = 128 << 10;

/// Starts the thread, which sends a Keep Alive every `interval`, or never.
pub(super) fn start(
    link: Link,
    interval: Option<Duration>,
    queues: Arc<Queues>,
) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name("nvme-keep-alive".to_owned()).stack_size(STACK).spawn(move || {
        let mut link = link;
        let failure = keep(&mut link, interval);
        tracing::debug!("a controller ended: {failure}");
        queues.end();
    })
}

/// Keeps the controller alive until it ends, and returns the reason.
fn keep(link: &mut Link, interval: Option<Duration>) -> Failure {
    // Without Keep Alives the thread only waits for the end, so any long timeout will do.
    let io_timeout = interval.unwrap_or(Duration::from_secs(u32::MAX.into()));
    loop {
        match link.next(Deadline::after(io_timeout)) {
            Err(Failure::Silent(_)) if !link.has_input() => {
                let deadline = Deadline::after(io_timeout);
                if let Err(failure) = Executor::new(link, deadline).keep_alive() {
                    return failure;
                }
            }
            Err(failure) => return failure,
            Ok(_) => return Failure::protocol("an answer to an unknown command"),
        }
    }
}
