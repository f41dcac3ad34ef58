//! The observer of all hosts: it reads each agent's ledger and journal.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use aquifer_api::client::Client;
use aquifer_api::path;
use aquifer_api::status::{Decision, Ledger, LoanState, Status};
use aquifer_cli::failure::{OrFail, Result};
use aquifer_hosts::block_on;
use aquifer_page::{Bytes, LeaseId, lock};

use super::stage::Member;

/// The sampling period.
const PERIOD: Duration = Duration::from_millis(250);

/// An agent that takes longer has no reading in this period.
const TIMEOUT: Duration = Duration::from_secs(1);

/// The observations so far.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// Seconds since the epoch when the observer began.
    pub(super) began: f64,
    pub(super) hosts: Vec<Watched>,
    /// The leases that their lenders recalled.
    pub(super) recalled: BTreeSet<LeaseId>,
}

/// The observations of one host.
#[derive(Debug)]
pub(super) struct Watched {
    pub(super) name: &'static str,
    pub(super) samples: Vec<Sample>,
    pub(super) decisions: Vec<Decision>,
    /// What the demo did to the host, with the seconds since the observer began.
    pub(super) events: Vec<(f64, String)>,
}

/// One reading of a host.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    /// Seconds since the observer began.
    pub(super) at: f64,
    pub(super) ledger: Ledger,
    /// RAM that pages of other hosts take.
    pub(super) stored: Bytes,
}

impl Seen {
    /// Takes in the status of a host.
    pub(super) fn note(&mut self, host: usize, at: f64, status: Status) {
        let watched = &mut self.hosts[host];
        let stored = status.loans.lent.iter().map(|lent| lent.stored).sum();
        watched.samples.push(Sample { at, ledger: status.ledger, stored });
        // The journal keeps the latest decisions only, and is in order of time.
        let is_new = |new: &Decision| {
            let known = watched.decisions.iter().rev().take_while(|known| known.at >= new.at);
            !known.into_iter().any(|known| known.at == new.at && known.what == new.what)
        };
        let last = watched.decisions.last().map_or(0.0, |decision| decision.at);
        let new: Vec<_> =
            status.history.decisions.into_iter().filter(|new| new.at >= last).collect();
        let new: Vec<_> = new.into_iter().filter(is_new).collect();
        watched.decisions.extend(new);
        let recalled = status.loans.lent.iter().filter(|lent| lent.state == LoanState::Recalled);
        self.recalled.extend(recalled.map(|lent| lent.lease));
    }

    /// Counts the readings of all hosts.
    pub(super) fn readings(&self) -> u64 {
        self.hosts.iter().map(|host| host.samples.len() as u64).sum()
    }

    /// Counts the readings in which the classes do not add up to the host's memory.
    pub(super) fn violations(&self) -> u64 {
        let is_wrong = |sample: &&Sample| {
            !sample.ledger.adds_up() || sample.ledger.overcommitted > Bytes::ZERO
        };
        self.hosts.iter().flat_map(|host| &host.samples).filter(is_wrong).count() as u64
    }
}

/// The observer's thread.
#[derive(Debug)]
pub(super) struct Watch {
    seen: Arc<Mutex<Seen>>,
    began: Instant,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Watch {
    pub(super) fn start(hosts: &[Member]) -> Result<Self> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let watched = |host: &Member| Watched {
            name: host.name(),
            samples: Vec::new(),
            decisions: Vec::new(),
            events: Vec::new(),
        };
        let seen = Arc::new(Mutex::new(Seen {
            began: since.or_fail(|| "reading the clock")?.as_secs_f64(),
            hosts: hosts.iter().map(watched).collect(),
            ..Seen::default()
        }));
        let stop = Arc::new(AtomicBool::new(false));
        let clients: Vec<_> =
            hosts.iter().map(|host| host.client().with_timeout(TIMEOUT)).collect();
        let (noted, over, began) = (seen.clone(), stop.clone(), Instant::now());
        let thread = std::thread::spawn(move || {
            while !over.load(Ordering::Relaxed) {
                look(&clients, began, &noted);
                std::thread::sleep(PERIOD);
            }
            look(&clients, began, &noted);
        });
        Ok(Self { seen, began, stop, thread })
    }

    /// Notes what the demo does to a host now.
    pub(super) fn mark(&self, host: &str, what: impl Into<String>) {
        let at = self.began.elapsed().as_secs_f64();
        let mut seen = lock(&self.seen);
        let host = seen.hosts.iter_mut().find(|watched| watched.name == host);
        if let Some(watched) = host {
            watched.events.push((at, what.into()));
        }
    }

    /// Ends the thread and returns the observations.
    pub(super) fn stop(self) -> Seen {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.join();
        std::mem::take(&mut *lock(&self.seen))
    }
}

fn look(clients: &[Client], began: Instant, seen: &Mutex<Seen>) {
    let ask = |client: &Client| block_on(client.get::<Status>(path::STATUS)).ok();
    for (host, client) in clients.iter().enumerate() {
        // An agent that has left the cluster answers no more.
        if let Some(status) = ask(client) {
            lock(seen).note(host, began.elapsed().as_secs_f64(), status);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn status(decisions: &[(f64, &str)], free: u64) -> Status {
        let sizes = |keys: &[&str]| -> Value {
            keys.iter().map(|key| ((*key).to_owned(), Value::from(0))).collect()
        };
        let mut memory =
            sizes(&["total", "used", "swap_used", "upper", "lower", "shareable", "spare"]);
        (memory["source"], memory["pressure"]) = (json!("host"), json!(false));
        let classes =
            ["reserved", "vm_floor", "vm_elastic", "cache_floor", "group_surplus", "lent"];
        let mut ledger = sizes(&classes);
        (ledger["total"], ledger["free"]) = (json!(64), json!(free));
        ledger["overcommitted"] = json!(0);
        let decisions: Vec<_> = decisions
            .iter()
            .map(|(at, what)| json!({ "at": at, "what": what, "about": [] }))
            .collect();
        let status = json!({
            "host": "a", "address": "10.0.0.1:7070", "admits": false, "pid": 1, "version": "1",
            "uptime_s": 1.0, "role": "neutral", "memory": memory, "ledger": ledger,
            "draining": null, "lent": [], "borrowed": [], "regions": [], "peers": [],
            "decisions": decisions, "events": [], "role_changes": [], "period_s": 0.1,
        });
        serde_json::from_value(status).unwrap()
    }

    fn seen() -> Seen {
        let host =
            |name| Watched { name, samples: Vec::new(), decisions: Vec::new(), events: Vec::new() };
        Seen { hosts: ["a", "b"].map(host).into(), ..Seen::default() }
    }

    #[test]
    fn a_decision_that_is_read_twice_counts_once() {
        let mut seen = seen();
        seen.note(0, 0.1, status(&[(1.0, "asks"), (1.0, "gets")], 64));
        seen.note(0, 0.2, status(&[(1.0, "gets"), (1.0, "hands"), (2.0, "asks")], 64));
        let told: Vec<_> = seen.hosts[0].decisions.iter().map(|it| it.what.as_str()).collect();
        assert_eq!(told, ["asks", "gets", "hands", "asks"]);
    }

    #[test]
    fn readings_that_do_not_add_up_are_violations() {
        let mut seen = seen();
        seen.note(0, 0.1, status(&[], 64));
        assert_eq!(seen.violations(), 0);
        seen.note(1, 0.1, status(&[], 63));
        assert_eq!((seen.violations(), seen.readings()), (1, 2));
    }
}
