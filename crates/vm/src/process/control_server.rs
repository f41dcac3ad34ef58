//! The supervisor's control socket, and the requests that it serves.

use std::fs::{self, Permissions};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, lock};
use aquifer_transport::accepting;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::files::Files;
use super::message::{Record, Request, Told};
use crate::error::VmError;
use crate::memory::{self, Resized, VmMemory};
use crate::migrate::{self, HandedOver, Order, Progress};
use crate::qmp::Qmp;

/// Timeout of a client's request and of writing an answer to it, and of a conflicting resize.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Largest request, in bytes.
const MAX_REQUEST: u64 = 64 << 10;

/// The supervisor's control server.
#[derive(Clone)]
pub(super) struct ControlServer {
    files: Files,
    /// Held while the VM migrates or resizes.
    moving: Arc<Mutex<()>>,
    /// Set to cancel the migration.
    cancelled: Arc<AtomicBool>,
    memory: VmMemory,
}

impl ControlServer {
    /// Binds the socket and answers each client on a thread of its own.
    pub(super) fn serve(files: &Files) -> io::Result<Self> {
        let memory = VmMemory::of(files);
        let server = Self {
            files: files.clone(),
            moving: Arc::default(),
            cancelled: Arc::default(),
            memory,
        };
        let path = files.supervisor();
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path)?;
        fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        let serving = server.clone();
        thread::Builder::new().name("control".to_owned()).spawn(move || {
            accepting::each(
                "clients",
                || false,
                || listener.accept(),
                |(client, _)| {
                    let serving = serving.clone();
                    let answering =
                        thread::Builder::new().name("answer".to_owned()).spawn(move || {
                            if let Err(error) = serving.answer(&client) {
                                tracing::warn!("a control connection ended early: {error}");
                            }
                        });
                    answering.map(drop)
                },
            );
        })?;
        let resizing = server.clone();
        // A VM that has moved away makes no requests.
        server
            .memory
            .attend(move |resize| {
                let _busy = resizing.busy();
                resize();
            })
            .map_err(io::Error::other)?;
        Ok(server)
    }

    /// Completes a resize that another process left unfinished: the VM keeps the size that it has.
    pub(super) fn settle(&self) {
        let _busy = self.busy();
        if let Err(error) = self.memory.settle() {
            tracing::warn!("cannot read the size of the VM's memory: {error}");
        }
    }

    fn resize(&self, order: &memory::Order, client: &UnixStream) -> Told {
        // A resize ends soon, so wait for it; a migration takes longer, and this request fails.
        let deadline = Instant::now() + TIMEOUT;
        let _busy = loop {
            match self.moving.try_lock() {
                Ok(busy) => break busy,
                Err(TryLockError::Poisoned(poisoned)) => break poisoned.into_inner(),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(20));
                }
                Err(TryLockError::WouldBlock) => {
                    let error = "another command migrates or resizes the VM: try again later";
                    return Told::Failed { error: error.to_owned() };
                }
            }
        };
        let mut has = None;
        let mut told = |size: Bytes| {
            !has_gone(client)
                && (has.replace(size) == Some(size) || tell(client, &Told::Has { size }).is_ok())
        };
        match self.memory.resize(order, &mut told) {
            Ok(resized) => {
                let Resized { from, reached, to, total_ms, .. } = &resized;
                tracing::info!("resized from {from} to {reached} (of {to}) in {total_ms:.0} ms");
                Told::Resized(Box::new(resized))
            }
            Err(error) => {
                tracing::error!("cannot resize the VM: {error}");
                failed(&error)
            }
        }
    }

    /// Waits until no thread migrates or resizes the VM, and excludes others until the guard drops.
    pub(super) fn busy(&self) -> MutexGuard<'_, ()> {
        lock(&self.moving)
    }

    fn answer(&self, client: &UnixStream) -> io::Result<()> {
        client.set_read_timeout(Some(TIMEOUT))?;
        client.set_write_timeout(Some(TIMEOUT))?;
        let mut line = String::new();
        BufReader::new(client.take(MAX_REQUEST)).read_line(&mut line)?;
        match serde_json::from_str(&line) {
            Ok(Request::Migrate(order)) => {
                let told = self.migrate(&order, client);
                tell(client, &told)
            }
            Ok(Request::Cancel) => tell(client, &self.cancel()),
            Ok(Request::Resize(order)) => {
                let told = self.resize(&order, client);
                tell(client, &told)
            }
            // Nothing but the adopted VM is to remain, so that the supervisor just exits.
            Ok(Request::Release) => std::process::exit(0),
            Ok(Request::Reading) => tell(
                client,
                &self.memory.reading().map_or_else(|error| failed(&error), Told::Reading),
            ),
            Ok(Request::Balloon { target }) => {
                // A VM in migration keeps the balloon that it has.
                let target = target.filter(|_| self.moving.try_lock().is_ok());
                let ballooned = self.memory.balloon(target);
                tell(client, &ballooned.map_or_else(|error| failed(&error), Told::Balloon))
            }
            Err(error) => tell(
                client,
                &Told::Failed { error: format!("cannot understand the request: {error}") },
            ),
        }
    }

    fn migrate(&self, order: &Order, client: &UnixStream) -> Told {
        let _moving = match self.moving.try_lock() {
            Err(TryLockError::WouldBlock) => {
                return Told::Failed {
                    error: "another command migrates the VM already".to_owned(),
                };
            }
            Ok(moving) => moving,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        };
        self.cancelled.store(false, Ordering::Relaxed);
        // The client hears of progress. If it hangs up, the migration is cancelled.
        let mut goes_on = |progress: &Progress| {
            tell(client, &Told::Progress(progress.clone())).is_ok()
                && !self.cancelled.load(Ordering::Relaxed)
        };
        match migrate::migrate(&self.files, order, &mut goes_on) {
            Ok(report) => {
                tracing::info!("moved to host {} in {:.0} ms", order.to, report.total_ms);
                Told::Moved(report)
            }
            Err(error) => {
                tracing::error!("cannot move the VM to host {}: {error}", order.to);
                self.serve_postcopy();
                Told::Failed { error: error.to_string() }
            }
        }
    }
}

impl ControlServer {
    /// Cancels the migration, and waits until it has ended.
    fn cancel(&self) -> Told {
        if self.moving.try_lock().is_ok() {
            return Told::Failed { error: "no migration of the VM is in progress".to_owned() };
        }
        self.cancelled.store(true, Ordering::Relaxed);
        let is_here = || matches!(self.files.read(), Ok(Record { handed_over: None, .. }));
        // Wait until the VM runs here again, or is gone.
        if is_here() {
            drop(self.busy());
        }
        match is_here() {
            true => Told::Cancelled,
            false => {
                Told::Failed { error: "too late to cancel: the destination owns the VM".to_owned() }
            }
        }
    }

    /// Sends the memory that a handed-over VM left here to its new host, and then ends QEMU here.
    /// Returns at once if nothing was left.
    pub(super) fn serve_postcopy(&self) {
        let Ok(Record { handed_over: Some(HandedOver { left_at_source: Some(link), .. }), .. }) =
            self.files.read()
        else {
            return;
        };
        let serving = self.clone();
        let started = thread::Builder::new().name("postcopy".to_owned()).spawn(move || {
            let _busy = serving.busy();
            if let Err(error) = migrate::serve_all(&serving.files, &link, None, &mut |_, _| ()) {
                return tracing::error!(
                    "cannot send the rest of the VM's memory to host {}: {error}",
                    link.host
                );
            }
            let quit = Qmp::connect(&serving.files.mover(), TIMEOUT)
                .and_then(|mut qmp| qmp.execute("quit", serde_json::json!({})));
            if let Err(VmError::Refused { why, .. }) = quit {
                tracing::error!("QEMU does not quit: {why}");
            }
        });
        if let Err(error) = started {
            tracing::error!("cannot start a thread that sends the VM's remaining memory: {error}");
        }
    }
}

/// Returns whether the client has hung up.
fn has_gone(client: &UnixStream) -> bool {
    let mut ends = [PollFd::new(client, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut ends, Some(&now)).is_ok_and(|count| count > 0)
}

fn failed(error: &VmError) -> Told {
    Told::Failed { error: error.to_string() }
}

fn tell(mut client: &UnixStream, told: &Told) -> io::Result<()> {
    let mut line = serde_json::to_vec(told)?;
    line.push(b'\n');
    client.write_all(&line)
}
