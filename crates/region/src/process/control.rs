//! The requests that an engine answers on its control socket.

use std::io;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use aquifer_control_socket::{Client, ControlSocket};
use aquifer_page::Bytes;
use aquifer_region_client::Run;
use aquifer_volume::{LeaseState, SecondCopy};

use super::files::{Files, RegionSpec};
use super::message::{Bucket, FetchTimes, Latency, RegionStatus, Request, Response};
use super::quota::Member;
use crate::engine::Engine;
use crate::error::RegionError;
use crate::lock;

/// How long a client may take to send a request, or to read an answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A region with its engine in this process.
pub(super) struct Serving {
    pub(super) files: Files,
    pub(super) spec: Mutex<RegionSpec>,
    /// Held while the record gets or loses a lease, together with the volume.
    pub(super) changing_leases: Mutex<()>,
    pub(super) engine: Arc<Engine>,
    member: Member,
    since: Instant,
}

impl Serving {
    pub(super) fn new(files: Files, spec: RegionSpec, engine: Arc<Engine>) -> Self {
        let member = Member::new(files.clone(), engine.clone());
        let (spec, changing_leases) = (Mutex::new(spec), Mutex::default());
        Self { files, spec, changing_leases, engine, member, since: Instant::now() }
    }

    /// Puts the cache within the limits that it shares with others. Returns false if
    /// [`Self::share_limits`] must try again.
    pub(super) fn join(&self) -> Result<bool, RegionError> {
        self.member.join(&lock(&self.spec))
    }

    /// Puts the cache within the shared limits unless it is, and grows it within them when it is
    /// short of room, until the engine ends.
    pub(super) fn share_limits(&self, has_joined: bool) {
        let spec = lock(&self.spec).clone();
        if !has_joined && let Err(error) = self.member.have(&spec, Bytes(u64::MAX)) {
            tracing::warn!("the region stays above the shared cache limit: {error}");
        }
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
            fetches: FetchTimes {
                latency: Latency::from(&times),
                histogram: Bucket::of(&times),
                link: self.engine.link_times().as_ref().map(Latency::from),
            },
            uptime_ms: self.since.elapsed().as_millis() as u64,
            volume,
        }
    }

    /// Changes the limit of the cache. `auto` is that of [`Request::ResizeCache`].
    fn resize_cache(&self, cache: Bytes, auto: Option<bool>) -> Result<(), RegionError> {
        // First: the next engine must not begin with a limit that stops its programs.
        self.engine.may_change()?;
        self.engine.may_limit(cache)?;
        if cache < lock(&self.spec).size {
            self.engine.watch()?;
        }
        let had = self.engine.cache();
        let before = {
            let spec = lock(&self.spec);
            (spec.cache, spec.auto)
        };
        // Recorded for a later engine. The lock is not held while pages leave, as other requests
        // read the specification.
        let spec = self.note(|spec| {
            if auto.is_none() && !spec.auto {
                let why = "the operator chose the size of the cache, so the agent must not";
                return Err(RegionError::Misuse(why.to_owned()));
            }
            (spec.cache, spec.auto) = (cache, auto.unwrap_or(spec.auto));
            Ok(())
        })?;
        self.member.have(&spec, cache).inspect_err(|_| {
            // The engine keeps its limit, as when the last lease left meanwhile. So must the next
            // one.
            if self.engine.cache() == had {
                let restored = self.note(|spec| {
                    (spec.cache, spec.auto) = before;
                    Ok(())
                });
                if let Err(error) = restored {
                    tracing::warn!("cannot record the limit of the cache: {error}");
                }
            }
        })?;
        match spec.spill {
            Some(spill) if self.engine.cache() >= spec.size => self.engine.empty_spill(spill.lease),
            _ => Ok(()),
        }
    }

    /// Changes the record. If `change` refuses, or the record cannot be written, nothing has
    /// changed.
    pub(super) fn note(
        &self,
        change: impl FnOnce(&mut RegionSpec) -> Result<(), RegionError>,
    ) -> Result<RegionSpec, RegionError> {
        let mut spec = lock(&self.spec);
        let mut changed = spec.clone();
        change(&mut changed)?;
        self.files.write(&changed)?;
        *spec = changed.clone();
        Ok(changed)
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
            // The other host has the leases, but not the second copies.
            self.engine.volume().empty_copies();
            return Ok(());
        }
        let count = lock(&self.spec).size.pages();
        self.engine.discard(Run { first: 0, count })?;
        // They may have missed discards.
        self.engine.volume().empty_copies();
        Ok(())
    }
}

impl Serving {
    /// Answers requests until the region is removed.
    pub(super) fn serve_until_removed(self: Arc<Self>, socket: ControlSocket) {
        let (removed, is_removed) = mpsc::channel();
        let answer = move |request, client: &Client| self.answer(request, client, &removed);
        match socket.serve(TIMEOUT, answer) {
            Ok(()) => _ = is_removed.recv(),
            Err(error) => tracing::error!("cannot start the thread that accepts clients: {error}"),
        }
    }

    fn answer(
        &self,
        request: Request,
        client: &Client,
        removed: &mpsc::Sender<()>,
    ) -> io::Result<()> {
        let failed = |error: RegionError| Response::Failed { error: error.to_string() };
        let done =
            |result: Result<(), RegionError>| result.map_or_else(failed, |()| Response::Done);
        let is_removal = request == Request::Remove;
        let response = match request {
            Request::Status => Response::Status(Box::new(self.status())),
            Request::ResizeCache { cache, auto } => done(self.resize_cache(cache, auto)),
            Request::Quota { most } => {
                let spec = lock(&self.spec).clone();
                done(self.member.have(&spec, most))
            }
            Request::Persist => done(self.engine.persist().map(drop)),
            Request::Drop { pages } => done(self.engine.discard(pages)),
            Request::Remove => self.remove().map_or_else(|refused| refused, |()| Response::Done),
            Request::Share { proposals } => {
                self.engine.share(&proposals).map_or_else(failed, Response::Merged)
            }
            Request::Unshare => done(self.engine.unshare_all()),
            Request::AddLease { lease, identity } => done(self.add_lease(*lease, identity)),
            Request::AddCopy { of, lease, lags } => {
                done(self.add_copy(SecondCopy { of, lease: *lease, lags }))
            }
            Request::KeepDiskCopies { directory } => done(self.keep_disk_copies(&directory)),
            Request::Evacuate { lease, spill } => {
                done(self.evacuate(lease, spill.as_deref(), |now| {
                    // A client that disconnects does not cancel its request.
                    _ = client.answer(&Response::Evacuating(now));
                }))
            }
            Request::Own => done(self.own()),
            Request::Send | Request::Receive => return self.hand_over(&request, client),
        };
        let answered = client.answer(&response);
        if is_removal && response == Response::Done {
            // The receiver outlives all senders.
            let _ = removed.send(());
        }
        answered
    }
}
