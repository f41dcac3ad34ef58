//! The control socket of a disk cache: one JSON object a line, one request a connection.

use std::fs::{self, Permissions};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use aquifer_page::{Bytes, Group};
use aquifer_region::process::{ControlCall, GroupFiles};
use aquifer_transport::accepting;
use serde::{Deserialize, Serialize};

use super::{CacheError, CacheStatus};

/// Largest request, in bytes.
const MAX_REQUEST: u64 = 64 << 10;

/// Timeout of a client's request and of writing the answer: other clients wait meanwhile.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Timeout of the cache's answer. The cache shrinks for a part of that time at most.
const ANSWERING: Duration = Duration::from_secs(8);

/// A request to a cache.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
enum Request {
    Status,
    /// Sets the most memory that the cache may have.
    Resize {
        size: Bytes,
    },
}

/// The cache's answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "response", rename_all = "snake_case")]
enum Response {
    Status(CacheStatus),
    Failed { error: String },
}

/// Returns the status of a group's cache on this host; `None` if there is none.
///
/// # Errors
/// [`CacheError::Io`] if the cache does not answer; [`CacheError::Refused`] if it answers with an
/// error.
pub fn status(regions_dir: &Path, group: &Group) -> Result<Option<CacheStatus>, CacheError> {
    ask(regions_dir, group, &Request::Status)
}

/// Sets the most memory that a group's cache may have, and returns the cache's status; `None` if
/// there is none. A cache with a fixed size ignores the request.
///
/// The status holds the size reached so far: a cache that has much to give back may need another
/// request.
///
/// # Errors
/// [`CacheError::Io`] if the cache does not answer; [`CacheError::Refused`] if it answers with an
/// error.
pub fn resize(
    regions_dir: &Path,
    group: &Group,
    size: Bytes,
) -> Result<Option<CacheStatus>, CacheError> {
    ask(regions_dir, group, &Request::Resize { size })
}

fn ask(
    regions_dir: &Path,
    group: &Group,
    request: &Request,
) -> Result<Option<CacheStatus>, CacheError> {
    let path = GroupFiles::new(regions_dir, group).cache_control();
    let asking =
        |source| CacheError::Io { what: "asking the cache at", path: path.clone(), source };
    let mut call = match ControlCall::ask(&path, request, ANSWERING) {
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
            ) =>
        {
            return Ok(None);
        }
        call => call.map_err(asking)?,
    };
    match call.answer().map_err(asking)? {
        Response::Status(status) => Ok(Some(status)),
        Response::Failed { error } => Err(CacheError::Refused(error)),
    }
}

fn say(mut to: &UnixStream, what: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    to.write_all(&line)
}

/// The operations that the socket serves.
pub(super) trait Asked: Send + Sync + 'static {
    fn status(&self) -> CacheStatus;
    fn resize(&self, size: Bytes);
}

/// The control socket and its thread. Dropping it ends both.
#[derive(Debug)]
pub(super) struct Control {
    listener: UnixListener,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Binds the socket, replacing a stale one. The caller holds the group's cache lock.
    pub(super) fn bind(path: &Path, asked: Arc<impl Asked>) -> io::Result<Self> {
        let _ = fs::remove_file(path);
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, Permissions::from_mode(0o600))?;
        let (theirs, ends) = (listener.try_clone()?, Arc::new(AtomicBool::new(false)));
        let ended = ends.clone();
        let thread = thread::Builder::new().name("control".to_owned()).spawn(move || {
            accepting::each(
                "clients",
                || ended.load(Ordering::Acquire),
                || theirs.accept(),
                |(client, _)| {
                    // Each client sends a single request at once, so that the next need not wait
                    // long.
                    if let Err(error) = answer(&client, &*asked) {
                        tracing::warn!("a control connection ended early: {error}");
                    }
                    Ok(())
                },
            );
        })?;
        Ok(Self { listener, ends, thread: Some(thread) })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Release);
        // Wakes the thread from accept(2).
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            // The panic hook has reported a panic there.
            let _ = thread.join();
        }
    }
}

fn answer(client: &UnixStream, asked: &impl Asked) -> io::Result<()> {
    client.set_read_timeout(Some(TIMEOUT))?;
    client.set_write_timeout(Some(TIMEOUT))?;
    let mut line = String::new();
    BufReader::new(client.take(MAX_REQUEST)).read_line(&mut line)?;
    let response = match serde_json::from_str(&line) {
        Ok(request) => {
            if let Request::Resize { size } = request {
                asked.resize(size);
            }
            Response::Status(asked.status())
        }
        Err(error) => Response::Failed { error: format!("cannot understand the request: {error}") },
    };
    say(client, &response)
}
