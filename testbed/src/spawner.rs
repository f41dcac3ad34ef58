//! Starts processes that must not outlive this one.

use std::io;
use std::process::{Child, Command};
use std::sync::OnceLock;
use std::sync::mpsc::{self, Sender};
use std::thread;

type Job = (Command, Sender<io::Result<Child>>);

/// Starts `command` from a thread that never ends: the kernel counts from the death of the thread that started a process,
/// and those that run tests come and go.
///
/// # Errors
/// If it cannot be started.
pub(crate) fn spawn(command: Command) -> io::Result<Child> {
    static SPAWNER: OnceLock<Sender<Job>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (jobs, queue) = mpsc::channel::<Job>();
        thread::spawn(move || {
            for (mut command, answer) in queue {
                let started = command.spawn();
                // With it go the descriptors that it has handed down.
                drop(command);
                let _ = answer.send(started);
            }
        });
        jobs
    });
    let (answer, started) = mpsc::channel();
    spawner.send((command, answer)).map_err(io::Error::other)?;
    started.recv().map_err(io::Error::other)?
}
