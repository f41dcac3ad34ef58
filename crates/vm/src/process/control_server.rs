//! The requests that a supervisor answers on its control socket.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_control_socket::{Client, ControlSocket};
use aquifer_page::{Bytes, lock};

use super::files::Files;
use super::message::{Record, Request, Told};
use crate::error::VmError;
use crate::memory::{self, Resized, VmMemory};
use crate::migrate::{self, HandedOver, Order, Progress};
use crate::qmp::Qmp;

/// Timeout of a client's request and of writing an answer to it, and of a conflicting resize.
const TIMEOUT: Duration = Duration::from_secs(10);

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
        let serving = server.clone();
        ControlSocket::bind(&files.supervisor())?
            .serve(TIMEOUT, move |request, client| serving.answer(request, client))?;
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

    fn resize(&self, order: &memory::Order, client: &Client) -> Told {
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
            !client.has_gone()
                && (has.replace(size) == Some(size) || client.answer(&Told::Has { size }).is_ok())
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

    fn answer(&self, request: Request, client: &Client) -> io::Result<()> {
        client.answer(&match request {
            Request::Migrate(order) => self.migrate(&order, client),
            Request::Cancel => self.cancel(),
            Request::Resize(order) => self.resize(&order, client),
            // Nothing but the adopted VM is to remain, so that the supervisor just exits.
            Request::Release => std::process::exit(0),
            Request::Reading => {
                self.memory.reading().map_or_else(|error| failed(&error), Told::Reading)
            }
            Request::Balloon { target } => {
                // A VM in migration keeps the balloon that it has.
                let target = target.filter(|_| self.moving.try_lock().is_ok());
                let ballooned = self.memory.balloon(target);
                ballooned.map_or_else(|error| failed(&error), Told::Balloon)
            }
        })
    }

    fn migrate(&self, order: &Order, client: &Client) -> Told {
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
            client.answer(&Told::Progress(progress.clone())).is_ok()
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

fn failed(error: &VmError) -> Told {
    Told::Failed { error: error.to_string() }
}
