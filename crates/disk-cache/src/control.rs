//! The control socket of a disk cache: one JSON object a line, one request a connection.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use aquifer_control_socket::{Answers, CallError, Client, ControlSocket, Serving};
use aquifer_page::{Bytes, Group};
use aquifer_region::process::GroupFiles;
use serde::{Deserialize, Serialize};

use super::{CacheError, CacheStatus};

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
    /// Unlocks a disk whose VM has moved to another host.
    Release {
        disk: PathBuf,
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
    status_within(regions_dir, group, ANSWERING)
}

/// Returns the status of a group's cache on this host that answers within `timeout`; `None` if
/// there is none.
///
/// # Errors
/// As [`status`].
pub fn status_within(
    regions_dir: &Path,
    group: &Group,
    timeout: Duration,
) -> Result<Option<CacheStatus>, CacheError> {
    ask(regions_dir, group, &Request::Status, timeout)
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
    ask(regions_dir, group, &Request::Resize { size }, ANSWERING)
}

/// Unlocks a disk, and drops its pages: its VM has moved to another host. If that VM runs here
/// again, its first write locks the disk again. Returns the cache's status; `None` if there is
/// none.
///
/// # Errors
/// [`CacheError::Io`] if the cache does not answer; [`CacheError::Refused`] if the disk cannot be
/// unlocked.
pub fn release(
    regions_dir: &Path,
    group: &Group,
    disk: &Path,
) -> Result<Option<CacheStatus>, CacheError> {
    ask(regions_dir, group, &Request::Release { disk: disk.to_owned() }, ANSWERING)
}

fn ask(
    regions_dir: &Path,
    group: &Group,
    request: &Request,
    timeout: Duration,
) -> Result<Option<CacheStatus>, CacheError> {
    let path = GroupFiles::new(regions_dir, group).cache_control();
    match Answers::to(&path, request, timeout).and_then(|mut answers| answers.receive()) {
        Ok(Response::Status(status)) => Ok(Some(status)),
        Ok(Response::Failed { error }) => Err(CacheError::Refused(error)),
        Err(CallError::Absent(..)) => Ok(None),
        Err(error) => {
            Err(CacheError::Io { what: "asking the cache at", path, source: error.into() })
        }
    }
}

/// The operations that the socket serves.
pub(super) trait Asked: Send + Sync + 'static {
    fn status(&self) -> CacheStatus;
    fn resize(&self, size: Bytes);
    fn release(&self, disk: &Path) -> io::Result<()>;
}

/// Serves the socket, replacing a stale one. The caller holds the group's cache lock.
///
/// Each client sends a single request at once, so that the next need not wait long.
pub(super) fn serve(path: &Path, asked: Arc<impl Asked>) -> io::Result<Serving> {
    ControlSocket::bind(path)?.serve_in_turn(TIMEOUT, move |request, client: &Client| {
        let done = match request {
            Request::Status => Ok(()),
            Request::Resize { size } => {
                asked.resize(size);
                Ok(())
            }
            Request::Release { disk } => asked.release(&disk).map_err(|error| {
                format!("the disk cache cannot unlock {}: {error}", disk.display())
            }),
        };
        match done {
            Ok(()) => client.answer(&Response::Status(asked.status())),
            Err(error) => client.answer(&Response::Failed { error }),
        }
    })
}
