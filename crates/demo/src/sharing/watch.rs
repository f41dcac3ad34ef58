//! The observer of both hosts, from outside: it reads cgroups, /proc and the store's files.
//!
//! Only the roles come from the agents.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquifer_api::client::Client;
use aquifer_api::path;
use aquifer_api::status::{Role, RoleChange, Status};
use aquifer_blockdev::process::client;
use aquifer_cli::cgroup::Cgroup;
use aquifer_cli::failure::Result;
use aquifer_hosts::stored;
use aquifer_page::{Bytes, lock};
use aquifer_procfs::process::size;
use tokio::runtime::Runtime;

use super::THRESHOLDS;
use super::host::Host;
use crate::live::Live;
use crate::picture::{self, History, Sample};

/// The sampling period of memory; also the resolution of activation and deactivation times.
const PERIOD: Duration = Duration::from_millis(20);

/// The number of periods between two requests for the agents' roles.
const ASK: u32 = 5;

/// The observer's thread.
#[derive(Debug)]
pub(super) struct Watch {
    seen: Arc<Mutex<Seen>>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

/// The observations so far.
#[derive(Debug)]
pub(super) struct Seen {
    memory: Bytes,
    pub(super) hosts: Vec<Watched>,
    pub(super) turns: [Overload; 2],
    stage: String,
    turn: usize,
}

/// The observations of one host.
#[derive(Debug)]
pub(super) struct Watched {
    pub(super) name: &'static str,
    samples: Vec<Sample>,
    /// RSS of its agent before it lent.
    pub(super) rss_before: Bytes,
    pub(super) role_changes: Vec<RoleChange>,
}

/// One host's overload: its moments and extremes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Overload {
    overloaded: Option<Instant>,
    activated: Option<Instant>,
    freed: Option<Instant>,
    returned: Option<Instant>,
    pub(super) borrowed_peak: Bytes,
    pub(super) lender_rss_peak: Bytes,
    pub(super) lender_rss_after: Bytes,
}

impl Overload {
    /// Returns the time from M_u above T_upper to swapon (\[Ge23\]).
    pub(super) fn activation(&self) -> Option<Duration> {
        Some(self.activated?.duration_since(self.overloaded?))
    }

    /// Returns the time from the end of the load to swapoff and free memory of the lender.
    pub(super) fn deactivation(&self) -> Option<Duration> {
        Some(self.returned?.duration_since(self.freed?))
    }
}

/// The sources of one host's observations.
struct Eyes {
    cgroup: Arc<Cgroup>,
    store: PathBuf,
    state: PathBuf,
    pid: i32,
    client: Client,
    role: Role,
}

impl Watch {
    pub(super) fn start(hosts: &[Host], memory: Bytes) -> Self {
        let watched = |host: &Host| Watched {
            name: host.name(),
            samples: Vec::new(),
            rss_before: size(pid(host).cast_unsigned(), "VmRSS"),
            role_changes: Vec::new(),
        };
        let seen = Arc::new(Mutex::new(Seen {
            memory,
            hosts: hosts.iter().map(watched).collect(),
            turns: [Overload::default(); 2],
            stage: String::new(),
            turn: 0,
        }));
        let eyes = hosts.iter().map(|host| Eyes {
            cgroup: host.cgroup().clone(),
            store: host.store().to_owned(),
            state: host.state(),
            pid: pid(host),
            client: host.client().with_timeout(Duration::from_secs(5)),
            role: Role::Neutral,
        });
        let stop = Arc::new(AtomicBool::new(false));
        let eyes: Vec<_> = eyes.collect();
        let thread = {
            let (seen, stop) = (seen.clone(), stop.clone());
            std::thread::spawn(move || watch(eyes, &seen, &stop))
        };
        Self { seen, stop, thread }
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        lock(&self.seen)
    }

    /// Notes that the overload of host `turn` begins.
    pub(super) fn begin(&self, turn: usize) {
        self.seen().turn = turn;
    }

    /// Notes that the load of host `turn` was told to free its memory.
    pub(super) fn freed(&self, turn: usize) {
        self.seen().turns[turn].freed = Some(Instant::now());
    }

    /// Returns whether all borrowed memory is given back and free again.
    pub(super) fn has_returned(&self, turn: usize) -> bool {
        self.seen().turns[turn].returned.is_some()
    }

    /// Sets the text of the current stage.
    pub(super) fn stage(&self, what: &str) {
        what.clone_into(&mut self.seen().stage);
    }

    /// Ends the thread and returns the observations.
    pub(super) fn stop(self) -> Seen {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.join();
        let mut seen = lock(&self.seen);
        let empty = Seen { hosts: Vec::new(), stage: String::new(), ..*seen };
        std::mem::replace(&mut *seen, empty)
    }
}

impl Seen {
    /// Draws both hosts over time.
    pub(super) fn picture(&self, memory: Bytes) -> Result<Vec<u8>> {
        let (upper, lower) = THRESHOLDS;
        let history = |watched: &Watched| History {
            title: format!("Host {}", watched.name.to_uppercase()),
            limit: memory,
            upper: memory.scaled(upper),
            lower: memory.scaled(lower),
            samples: watched.samples.clone(),
        };
        let histories: Vec<_> = self.hosts.iter().map(history).collect();
        picture::png(
            "Two hosts share memory: pages that one swaps out are in the other's RAM",
            &histories,
        )
    }
}

fn watch(mut eyes: Vec<Eyes>, seen: &Mutex<Seen>, stop: &AtomicBool) {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return;
    };
    let began = Instant::now();
    let live = {
        let seen = lock(seen);
        let names: Vec<_> = seen.hosts.iter().map(|host| (host.name, seen.memory)).collect();
        Live::new(&names)
    };
    let mut period = 0;
    while !stop.load(Ordering::Relaxed) {
        if period % ASK == 0 {
            for (index, eye) in eyes.iter_mut().enumerate() {
                ask(eye, &runtime, &mut |changes| lock(seen).hosts[index].role_changes = changes);
            }
        }
        period += 1;
        let samples: Vec<_> = eyes.iter().map(|eye| look(eye, began)).collect();
        let swap_on = swap_is_on(&eyes);
        let rss: Vec<_> = eyes.iter().map(|eye| size(eye.pid.cast_unsigned(), "VmRSS")).collect();
        {
            let mut seen = lock(seen);
            seen.note(&samples, &rss, swap_on);
            live.stage(&seen.stage);
        }
        for (index, sample) in samples.iter().enumerate() {
            live.show(index, sample);
        }
        std::thread::sleep(PERIOD);
    }
    // Asks for the roles once more, after all memory was given back.
    for (index, eye) in eyes.iter_mut().enumerate() {
        ask(eye, &runtime, &mut |changes| lock(seen).hosts[index].role_changes = changes);
    }
}

impl Seen {
    fn note(&mut self, samples: &[Sample], rss: &[Bytes], swap_on: bool) {
        let upper = self.memory.scaled(THRESHOLDS.0);
        let now = Instant::now();
        let (borrower, lender) = (self.turn, 1 - self.turn);
        let turn = &mut self.turns[self.turn];
        if samples[borrower].ram > upper {
            turn.overloaded.get_or_insert(now);
        }
        if swap_on && turn.overloaded.is_some() {
            turn.activated.get_or_insert(now);
        }
        turn.borrowed_peak = turn.borrowed_peak.max(samples[borrower].swap);
        if turn.returned.is_none() {
            turn.lender_rss_peak = turn.lender_rss_peak.max(rss[lender]);
            turn.lender_rss_after = rss[lender];
        }
        let over = turn.freed.is_some()
            && !swap_on
            && samples.iter().all(|sample| sample.lent == Bytes::ZERO);
        if over && samples.iter().all(|sample| sample.role == Role::Neutral) {
            turn.returned.get_or_insert(now);
        }
        for (watched, sample) in self.hosts.iter_mut().zip(samples) {
            watched.samples.push(*sample);
        }
    }
}

fn ask(eye: &mut Eyes, runtime: &Runtime, changes: &mut dyn FnMut(Vec<RoleChange>)) {
    if let Ok(status) = runtime.block_on(eye.client.get::<Status>(path::STATUS)) {
        eye.role = status.role;
        changes(status.history.role_changes);
    }
}

fn look(eye: &Eyes, began: Instant) -> Sample {
    let lent = stored(&eye.store);
    let used = eye.cgroup.memory_used().unwrap_or_default();
    let swap = eye.cgroup.swap_used().unwrap_or_default();
    Sample { at: began.elapsed().as_secs_f64(), ram: used + lent, swap, lent, role: eye.role }
}

/// Returns whether a volume of these hosts is swapped to; ignores other swap devices of this
/// machine.
fn swap_is_on(eyes: &[Eyes]) -> bool {
    let swaps = aquifer_blockdev::swap::swaps().unwrap_or_default();
    if swaps.is_empty() {
        return false;
    }
    let volumes = |eye: &Eyes| {
        let state = eye.state.clone();
        let ids = client::list(&state).unwrap_or_default();
        ids.into_iter().filter_map(move |volume| client::record(&state, volume).ok())
    };
    eyes.iter().flat_map(volumes).any(|record| swaps.iter().any(|swap| swap.path == record.device))
}

/// Returns the process of a host's agent.
fn pid(host: &Host) -> i32 {
    host.pid().map_or(0, |pid| pid.as_raw_pid())
}
