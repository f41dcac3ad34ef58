//! The control socket: one JSON object a line, one request a connection.

use std::fs::{self, Permissions};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use aquifer_fabric::accepting;
use aquifer_page::{Bytes, Group};
use aquifer_region::process::{ControlCall, GroupFiles};
use serde::{Deserialize, Serialize};

use super::{CacheError, Status};

/// Longer requests are not ours.
const MAX_REQUEST: u64 = 64 << 10;

/// How long a client may take to ask, or to read an answer: others wait meanwhile.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long the cache may take for an answer. It gives back as much memory as it can in a part of that.
const ANSWERING: Duration = Duration::from_secs(8);

/// What a cache is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
enum Request {
    Status,
    /// Have at most so much.
    Resize {
        size: Bytes,
    },
}

/// What it answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "response", rename_all = "snake_case")]
enum Response {
    Status(Status),
    Failed { error: String },
}

/// How the cache of a group is whose regions are in a directory. None if there is none.
///
/// # Errors
/// [`CacheError`].
pub fn status(regions_dir: &Path, group: &Group) -> Result<Option<Status>, CacheError> {
    ask(regions_dir, group, &Request::Status)
}

/// Has that cache have at most so much, unless its size is fixed, and says how it is. None if there is none.
///
/// What it says is what it has by now: one that has much to give back may need to be told again.
///
/// # Errors
/// [`CacheError`].
pub fn resize(
    regions_dir: &Path,
    group: &Group,
    size: Bytes,
) -> Result<Option<Status>, CacheError> {
    ask(regions_dir, group, &Request::Resize { size })
}

fn ask(regions_dir: &Path, group: &Group, request: &Request) -> Result<Option<Status>, CacheError> {
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

/// What a cache does when it is asked.
pub(super) trait Asked: Send + Sync + 'static {
    fn status(&self) -> Status;
    fn resize(&self, size: Bytes);
}

/// The socket, and the thread that answers there. Dropping it ends both.
#[derive(Debug)]
pub(super) struct Control {
    listener: UnixListener,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Nobody else is to be at that path.
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
                    // A client asks one thing, and soon: another one need not wait long.
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
        // Wakes the thread that waits there.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

fn answer(client: &UnixStream, asked: &impl Asked) -> io::Result<()> {
    client.set_read_timeout(Some(PATIENCE))?;
    client.set_write_timeout(Some(PATIENCE))?;
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
