//! The control socket of an engine, and its answers.

use std::fs::{self, Permissions};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::Bytes;
use aquifer_region_client::Run;
use aquifer_transport::accepting;
use aquifer_volume::LeaseState;

use super::files::{Files, RegionSpec};
use super::message::{Bucket, Latency, RegionStatus, Request, Response};
use super::quota::Member;
use crate::engine::Engine;
use crate::error::RegionError;
use crate::lock;

/// The longest request, in bytes.
const MAX_REQUEST: u64 = 64 << 10;

/// How long a client may take to send a request, or to read an answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A region with its engine in this process.
pub(super) struct Serving {
    pub(super) files: Files,
    spec: Mutex<RegionSpec>,
    pub(super) engine: Arc<Engine>,
    member: Member,
    since: Instant,
}

impl Serving {
    pub(super) fn new(files: Files, spec: RegionSpec, engine: Arc<Engine>) -> Self {
        let member = Member::new(files.clone(), engine.clone());
        Self { files, spec: Mutex::new(spec), engine, member, since: Instant::now() }
    }

    /// Puts the cache within the limits that it shares with others.
    pub(super) fn join(&self) -> Result<(), RegionError> {
        self.member.join(&lock(&self.spec))
    }

    /// Grows the cache when it is short of room, within the shared limits, until the engine ends.
    pub(super) fn grow(&self) {
        self.member.see_to_it(|| lock(&self.spec).cache);
    }

    pub(super) fn status(&self) -> RegionStatus {
        let times = self.engine.times();
        let volume = self.engine.volume().status();
        let away = volume
            .leases
            .iter()
            .any(|lease| matches!(lease.state, LeaseState::Unreachable { .. } | LeaseState::Lost));
        let [stalled, fetching] = self.engine.waiting();
        let counts = self.engine.counts();
        let here = counts.second_chances + counts.late_faults;
        RegionStatus {
            spec: lock(&self.spec).clone().without_keys(),
            pid: std::process::id(),
            programs: self.engine.mapped_by(),
            processes: self.engine.processes(),
            usage: self.engine.usage(),
            waiting: (stalled + if away { fetching } else { 0 }) as u64,
            counts,
            hit_rate: here as f64 / (here + counts.remote_faults).max(1) as f64,
            latency: Latency::from(&times),
            histogram: Bucket::of(&times),
            link: self.engine.link_times().as_ref().map(Latency::from),
            uptime_ms: self.since.elapsed().as_millis() as u64,
            volume,
        }
    }

    fn resize_cache(&self, cache: Bytes) -> Result<(), RegionError> {
        let spec = self.note_cache(cache)?;
        self.member.have(&spec, cache)
    }

    /// Records the size for a later engine. The lock is not held while pages leave, as other
    /// requests read the specification.
    fn note_cache(&self, cache: Bytes) -> Result<RegionSpec, RegionError> {
        let mut spec = lock(&self.spec);
        spec.cache = cache;
        self.files.write(&spec)?;
        Ok(spec.clone())
    }

    /// Discards all pages, if no program has the region mapped.
    fn remove(&self) -> Result<(), Response> {
        let in_use = |programs: Vec<String>| Response::InUse { programs: programs.join(", ") };
        self.engine.begin_removal().map_err(in_use)?;
        self.discard_all().map_err(|error| {
            self.engine.end_removal();
            Response::Failed { error: error.to_string() }
        })
    }

    fn discard_all(&self) -> Result<(), RegionError> {
        if self.files.is_foreign() {
            return Ok(());
        }
        let count = lock(&self.spec).size.pages();
        self.engine.discard(Run { first: 0, count })
    }
}

/// The control socket of an engine.
pub(super) struct Control {
    listener: UnixListener,
    serving: Arc<Serving>,
}

impl Control {
    pub(super) fn bind(serving: Arc<Serving>) -> io::Result<Self> {
        let path = serving.files.control();
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path)?;
        fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        Ok(Self { listener, serving })
    }

    /// Answers each client on a thread of its own, until the region is removed.
    pub(super) fn serve_until_removed(self) {
        let (removed, is_removed) = mpsc::channel();
        let Self { listener, serving } = self;
        let accepting = thread::Builder::new().name("control".to_owned()).spawn(move || {
            accepting::each(
                "clients",
                || false,
                || listener.accept(),
                |(client, _)| {
                    let (serving, removed) = (serving.clone(), removed.clone());
                    let answering =
                        thread::Builder::new().name("answer".to_owned()).spawn(move || {
                            match serving.converse(&client) {
                                // The receiver outlives all senders.
                                Ok(true) => _ = removed.send(()),
                                Ok(false) => {}
                                Err(error) => {
                                    tracing::warn!("a control connection ended early: {error}")
                                }
                            }
                        });
                    answering.map(drop)
                },
            );
        });
        match accepting {
            Ok(_) => _ = is_removed.recv(),
            Err(error) => tracing::error!("cannot start the thread that accepts clients: {error}"),
        }
    }
}

impl Serving {
    /// Reads one request and answers it. Returns true if the region was removed.
    fn converse(&self, client: &UnixStream) -> io::Result<bool> {
        client.set_read_timeout(Some(TIMEOUT))?;
        client.set_write_timeout(Some(TIMEOUT))?;
        let mut line = String::new();
        BufReader::new(client.take(MAX_REQUEST)).read_line(&mut line)?;
        let done = |result: Result<(), RegionError>| {
            result.map_or_else(
                |error| Response::Failed { error: error.to_string() },
                |()| Response::Done,
            )
        };
        let mut removed = false;
        let response = match serde_json::from_str(&line) {
            Ok(Request::Status) => Response::Status(Box::new(self.status())),
            Ok(Request::ResizeCache { cache }) => done(self.resize_cache(cache)),
            Ok(Request::Quota { most }) => {
                let spec = lock(&self.spec).clone();
                done(self.member.have(&spec, most))
            }
            Ok(Request::Persist) => done(self.engine.persist().map(drop)),
            Ok(Request::Drop { pages }) => done(self.engine.discard(pages)),
            Ok(Request::Remove) => {
                let done = self.remove();
                removed = done.is_ok();
                done.map_or_else(|refused| refused, |()| Response::Done)
            }
            Ok(Request::Share { proposals }) => match self.engine.share(&proposals) {
                Ok(merged) => Response::Merged(merged),
                Err(error) => Response::Failed { error: error.to_string() },
            },
            Ok(Request::Unshare) => done(self.engine.unshare_all()),
            Ok(Request::Own) => done(self.own()),
            Ok(request @ (Request::Send | Request::Receive)) => {
                self.hand_over(&request, client)?;
                return Ok(false);
            }
            Err(error) => {
                Response::Failed { error: format!("cannot understand the request: {error}") }
            }
        };
        answer(client, &response).map(|()| removed).or(if removed { Ok(true) } else { Ok(false) })
    }
}

pub(super) fn answer(mut client: &UnixStream, response: &Response) -> io::Result<()> {
    let mut line = serde_json::to_vec(response)?;
    line.push(b'\n');
    client.write_all(&line)
}
