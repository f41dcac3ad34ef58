//! The connection to the process in a guest that runs commands.

use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use aquifer_page::lock;

use crate::wait::Deadline;
use crate::wire::{CHUNK, Frame, Kind};

/// The end of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The command ended with this exit code.
    Exit(i32),
    /// The command did not run.
    Failed(String),
    /// The host is gone.
    Gone,
}

/// A command's output and end, as received.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) end: Option<End>,
}

/// A command in a guest, as this side sees it.
#[derive(Debug, Default)]
pub(crate) struct Running {
    progress: Mutex<Progress>,
    changed: Condvar,
}

impl Running {
    /// Locks and returns the progress.
    pub(crate) fn progress(&self) -> MutexGuard<'_, Progress> {
        lock(&self.progress)
    }

    /// Waits until `done` returns a value; returns `None` after `limit`.
    pub(crate) fn wait<T>(
        &self,
        limit: Duration,
        mut done: impl FnMut(&mut Progress) -> Option<T>,
    ) -> Option<T> {
        let mut deadline = Deadline::after(limit);
        let mut progress = self.progress();
        loop {
            if let Some(found) = done(&mut progress) {
                return Some(found);
            }
            let left = deadline.left()?;
            progress =
                self.changed.wait_timeout(progress, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn change(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.progress());
        self.changed.notify_all();
    }
}

/// The connection to one boot of a guest.
#[derive(Debug)]
pub(crate) struct Line {
    stream: Mutex<UnixStream>,
    processes: Mutex<HashMap<u32, Arc<Running>>>,
    next: AtomicU32,
    /// Process 0: whether the guest is up, and whether it is gone.
    guest: Arc<Running>,
}

impl Line {
    /// Receives frames from `stream` on a thread of its own.
    ///
    /// # Errors
    /// If the stream cannot be duplicated for that thread.
    pub(crate) fn open(stream: UnixStream) -> std::io::Result<Arc<Self>> {
        let mut receiving = stream.try_clone()?;
        let line = Arc::new(Self {
            stream: Mutex::new(stream),
            processes: Mutex::default(),
            next: AtomicU32::new(1),
            guest: Arc::default(),
        });
        let listening = line.clone();
        thread::spawn(move || {
            while let Ok(frame) = Frame::receive(&mut receiving) {
                listening.hear(frame);
            }
            let mut processes = listening.processes();
            listening.guest.change(|progress| progress.end = Some(End::Gone));
            for (_, process) in processes.drain() {
                process.change(|progress| progress.end = Some(End::Gone));
            }
        });
        Ok(line)
    }

    fn processes(&self) -> MutexGuard<'_, HashMap<u32, Arc<Running>>> {
        lock(&self.processes)
    }

    fn hear(&self, frame: Frame) {
        if frame.kind == Kind::Ready {
            return self.guest.change(|progress| progress.stdout.push(b'!'));
        }
        let Some(process) = self.processes().get(&frame.process).cloned() else { return };
        let code = frame.exit_code();
        process.change(|progress| match frame.kind {
            Kind::Output => progress.stdout.extend_from_slice(&frame.data),
            Kind::Error => progress.stderr.extend_from_slice(&frame.data),
            Kind::Exit => progress.end = Some(End::Exit(code)),
            Kind::Failed => {
                progress.end = Some(End::Failed(String::from_utf8_lossy(&frame.data).into_owned()))
            }
            _ => {}
        });
    }

    /// Waits until the guest is up; returns false if it is gone or `limit` passes.
    pub(crate) fn wait_until_ready(&self, limit: Duration) -> bool {
        let ready = |guest: &mut Progress| {
            (guest.end.is_some() || !guest.stdout.is_empty()).then_some(guest.end.is_none())
        };
        self.guest.wait(limit, ready).unwrap_or(false)
    }

    /// Tells whether the other end is gone.
    pub(crate) fn is_gone(&self) -> bool {
        self.guest.progress().end.is_some()
    }

    /// Starts a shell command; returns its process number and its state.
    pub(crate) fn start(&self, command: &str) -> (u32, Arc<Running>) {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let running = Arc::new(Running::default());
        {
            let mut processes = self.processes();
            if self.is_gone() {
                running.change(|progress| progress.end = Some(End::Gone));
                return (id, running);
            }
            processes.insert(id, running.clone());
        }
        if command.len() > CHUNK {
            running.change(|progress| {
                progress.end = Some(End::Failed("the command is too long".to_owned()))
            });
        } else {
            self.say(id, Kind::Start, command);
        }
        (id, running)
    }

    /// Sends a frame about a process. A failed send shows where the caller waits for answers.
    pub(crate) fn say(&self, process: u32, kind: Kind, data: impl Into<Vec<u8>>) {
        let stream = lock(&self.stream);
        let _ = Frame::new(process, kind, data).send(&*stream);
    }
}
