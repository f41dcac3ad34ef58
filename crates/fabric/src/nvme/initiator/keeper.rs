//! The thread of an admin queue. It sleeps but for a sign of life now and then, and finds out when the controller ends.

use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::Failure;
use super::controller::Queues;
use super::execute::Executor;
use super::link::Link;
use crate::initiating::Deadline;

/// It needs little, and is locked memory where we swap.
const STACK: usize = 128 << 10;

/// Starts it. Every `interval` it gives a sign of life, if there is one.
pub(super) fn start(
    link: Link,
    interval: Option<Duration>,
    queues: Arc<Queues>,
) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name("nvme-keeper".to_owned()).stack_size(STACK).spawn(move || {
        let mut link = link;
        let failure = keep(&mut link, interval);
        tracing::debug!("a controller has ended: {failure}");
        queues.end();
    })
}

/// Keeps the controller alive until it ends, and says why it did.
fn keep(link: &mut Link, interval: Option<Duration>) -> Failure {
    // Where there is nothing to do, it waits for the end, which needs no deadline.
    let patience = interval.unwrap_or(Duration::from_secs(u32::MAX.into()));
    loop {
        match link.next(Deadline::after(patience)) {
            Err(Failure::Silent(_)) if !link.has_input() => {
                let deadline = Deadline::after(patience);
                if let Err(failure) = Executor::new(link, deadline).keep_alive() {
                    return failure;
                }
            }
            Err(failure) => return failure,
            Ok(_) => return Failure::protocol("an answer to a command that was not given"),
        }
    }
}
