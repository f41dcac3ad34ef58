//! A thread that starts processes which must not outlive this one.

use std::io;
use std::process::{Child, Command};
use std::sync::OnceLock;
use std::sync::mpsc::{self, Sender};
use std::thread;

type Job = (Command, Sender<io::Result<Child>>);

/// Starts `command` from a thread that never ends. The kernel kills a process at the death of the
/// thread that started it (PR_SET_PDEATHSIG in prctl(2)), and test threads come and go.
///
/// # Errors
/// If the command cannot start.
pub(crate) fn spawn(command: Command) -> io::Result<Child> {
    static SPAWNER: OnceLock<Sender<Job>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (jobs, queue) = mpsc::channel::<Job>();
        thread::spawn(move || {
            for (mut command, answer) in queue {
                let started = command.spawn();
                // Closes the descriptors that the command handed down.
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
