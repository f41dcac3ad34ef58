//! What a keeper is asked.

use std::fs::{self, Permissions};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::Duration;

use super::files::Files;
use super::message::{Request, Told};
use crate::migrate::{self, Order, Progress};

/// How long a client may take to ask, or to read an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Longer requests are not ours.
const MAX_REQUEST: u64 = 64 << 10;

/// The keeper's socket.
#[derive(Clone)]
pub(super) struct Asked {
    files: Files,
    /// Held by who moves the VM.
    moving: Arc<Mutex<()>>,
}

impl Asked {
    /// Answers whoever asks, each on a thread of its own.
    pub(super) fn serve(files: &Files) -> io::Result<Self> {
        let asked = Self { files: files.clone(), moving: Arc::default() };
        let path = files.keeper();
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path)?;
        fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        let serving = asked.clone();
        thread::Builder::new().name("asked".to_owned()).spawn(move || {
            for client in listener.incoming().flatten() {
                let serving = serving.clone();
                let answering = thread::Builder::new().name("answer".to_owned()).spawn(move || {
                    if let Err(error) = serving.answer(&client) {
                        tracing::warn!("who asked has gone: {error}");
                    }
                });
                if let Err(error) = answering {
                    tracing::error!("cannot start a thread for who asks: {error}");
                }
            }
        })?;
        Ok(asked)
    }

    /// Waits until nobody moves the VM, and has nobody do so.
    pub(super) fn busy(&self) -> MutexGuard<'_, ()> {
        self.moving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, client: &UnixStream) -> io::Result<()> {
        client.set_read_timeout(Some(PATIENCE))?;
        client.set_write_timeout(Some(PATIENCE))?;
        let mut line = String::new();
        BufReader::new(client.take(MAX_REQUEST)).read_line(&mut line)?;
        match serde_json::from_str(&line) {
            Ok(Request::Migrate(order)) => {
                let told = self.migrate(&order, client);
                tell(client, &told)
            }
            Err(error) => {
                tell(client, &Told::Failed { error: format!("cannot understand the request: {error}") })
            }
        }
    }

    fn migrate(&self, order: &Order, client: &UnixStream) -> Told {
        let _moving = match self.moving.try_lock() {
            Err(TryLockError::WouldBlock) => {
                return Told::Failed { error: "the VM is on the move already".to_owned() };
            }
            Ok(moving) => moving,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        };
        // Who asked hears of progress as long as it wants the VM to move.
        let mut goes_on = |progress: &Progress| tell(client, &Told::Progress(progress.clone())).is_ok();
        match migrate::migrate(&self.files, order, &mut goes_on) {
            Ok(report) => {
                tracing::info!("moved to host {} in {:.0} ms", order.to, report.total_ms);
                Told::Moved(report)
            }
            Err(error) => {
                tracing::error!("not moved to host {}: {error}", order.to);
                Told::Failed { error: error.to_string() }
            }
        }
    }
}

fn tell(mut client: &UnixStream, told: &Told) -> io::Result<()> {
    let mut line = serde_json::to_vec(told)?;
    line.push(b'\n');
    client.write_all(&line)
}
