//! The agreements of the cluster's groups: this host gives its own to the other hosts, and gets
//! theirs.
//!
//! Gossip tells a digest of what each host knows. A host that sees a new digest asks that host for
//! its list, without keys, and then for the agreements that it lacks. Both travel under mutual TLS.
//! `aquifer_control::group::agreements` decides whom to ask and what to take. `exchange` has the
//! questions and the answers.

mod exchange;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::hash::{BuildHasher as _, RandomState};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

use aquifer_api::Problem;
use aquifer_api::agreement::{Find, Found, Known, KnownAgreement};
use aquifer_control::group::agreements::{
    Asking, Catalog, Holding, KeyId, Line, MOST_LINES, Next, State as KeyState, Wanted,
};
use aquifer_group::{Agreements, GroupError, Held, Survey, digest};
use aquifer_page::{Group, HostName, lock};
use tokio::time::timeout_at;

use crate::cluster::Gossip;
use crate::config::Config;
use crate::driver::Journal;
use crate::peers::Peers;

/// How often the agent checks whether an operator changed a file, and what gossip tells.
const FILE_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Timeout of the search for an agreement that a command needs now.
const FIND_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval between the checks of that search.
const FIND_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// How many warnings the agent remembers, so that it gives each once.
const MOST_WARNINGS: usize = 1000;

/// This host's part in passing agreements on.
#[derive(Clone, Debug)]
pub struct Passing(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    own: HostName,
    agreements: Agreements,
    regions: PathBuf,
    peers: Peers,
    gossip: Option<Gossip>,
    journal: Journal,
    begun: Instant,
    state: Mutex<State>,
    /// One question at a time.
    turn: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    catalog: Catalog,
    survey: Survey,
    /// The files when the agent last read them.
    files: Option<Files>,
    asking: Asking,
    /// Why the agent last failed to read the files.
    failed: Option<String>,
    /// The warnings that the log has.
    warned: BTreeSet<(Group, String)>,
    /// Whether the log has the warning of a full catalog.
    warned_full: bool,
}

/// The name, inode, time and size of each file.
type Files = BTreeMap<PathBuf, (u64, Option<SystemTime>, u64)>;

impl Passing {
    /// Begins with the files of the configured directory.
    pub(crate) fn new(
        config: &Config,
        peers: Peers,
        gossip: Option<Gossip>,
        journal: Journal,
    ) -> Self {
        Self(Arc::new(Inner {
            own: config.host.clone(),
            agreements: Agreements::of(&config.groups.agreements),
            regions: config.state.join("regions"),
            peers,
            gossip,
            journal,
            begun: Instant::now(),
            state: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
        }))
    }

    /// Passes agreements on for as long as the caller polls the future.
    pub(crate) async fn run(self) {
        loop {
            self.look().await;
            let next = self.next();
            let pause = match next {
                Next::Ask(host) => {
                    self.ask(&host).await;
                    Duration::ZERO
                }
                Next::At(at) => at.saturating_sub(self.now()).min(FILE_POLL_INTERVAL),
                Next::Nothing => FILE_POLL_INTERVAL,
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// Reads the files if they changed, and tells the other hosts if that is news.
    async fn look(&self) {
        // Without a change this is a few system calls, less than another thread costs.
        let files = files(&self.0.agreements);
        let is_as_before = self.state().is_as(&files);
        let failed = if is_as_before { None } else { self.survey(files).await.err() };
        let before = std::mem::replace(&mut self.state().failed, failed.clone());
        // Only the first of equal failures: there is one each second.
        if let Some(error) = failed.filter(|failed| before.as_ref() != Some(failed)) {
            tracing::warn!("cannot read the groups' agreements: {error}");
        }
    }

    async fn survey(&self, files: Files) -> Result<(), String> {
        let inner = self.0.clone();
        let surveyed = tokio::task::spawn_blocking(move || inner.survey(files)).await;
        surveyed.map_err(|error| error.to_string())?.map_err(|error| error.to_string())
    }

    fn next(&self) -> Next {
        let told = self.0.peers.agreements();
        let now = self.now();
        let mut state = self.state();
        let (own, wanted) = (state.digest(), state.wanted(&self.0.own));
        state.asking.next(now, (own, &wanted), &told, RandomState::new().hash_one(now))
    }

    fn now(&self) -> Duration {
        self.0.begun.elapsed()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0.state)
    }

    /// Finds the agreement of a group now, here or on another host.
    ///
    /// # Errors
    /// If hosts have different agreements with that name, and this one has none.
    pub(crate) async fn find(&self, Find { group, wait }: &Find) -> Result<Found, Problem> {
        let ends = Instant::now() + if *wait { FIND_TIMEOUT } else { Duration::ZERO };
        if *wait {
            self.state().asking.retry();
        }
        // These tell nothing by gossip.
        let listed = self.0.peers.listed();
        if *wait && !listed.is_empty() {
            let _ = timeout_at(ends.into(), self.ask_all(listed)).await;
        }
        loop {
            self.look().await;
            let (found, is_wanted) = self.state().found(group, &self.0)?;
            let is_known = !is_wanted && (found.found || found.known_by.is_some());
            if is_known || Instant::now() >= ends {
                return Ok(found);
            }
            if self.0.peers.agreements().is_empty() {
                return Ok(found);
            }
            self.state().asking.hurry();
            match self.next() {
                Next::Ask(host) => _ = timeout_at(ends.into(), self.ask(&host)).await,
                _ => tokio::time::sleep(FIND_POLL_INTERVAL).await,
            }
        }
    }

    /// Returns what this host knows of all agreements, with the conflicts.
    pub(crate) async fn known(&self) -> Known {
        self.look().await;
        let state = self.state();
        let mut known = state.known();
        for line in known.agreements.iter_mut().filter(|line| line.edition.is_some()) {
            line.conflict = state.conflict(&line.group);
        }
        known
    }
}

impl Inner {
    fn survey(&self, files: Files) -> Result<(), GroupError> {
        let catalog = lock(&self.state).catalog.clone();
        let survey = self.agreements.survey(&self.own, &self.regions, &catalog)?;
        let mut state = lock(&self.state);
        let State { catalog, survey: before, .. } = &mut *state;
        self.limit_caches(before, &survey);
        for (group, held) in &survey.held {
            let line = Line {
                state: KeyState::Agreed(held.edition),
                by: held.by.clone(),
                hosts: held.agreement.hosts.clone(),
            };
            catalog.hold(group, held.key, line);
        }
        for (group, key) in &survey.removed {
            let line = Line { state: KeyState::Removed, by: self.own.clone(), hosts: Vec::new() };
            catalog.hold(group, *key, line);
        }
        for (group, problem) in &survey.problems {
            state.warn(&self.journal, group, problem.clone());
        }
        // The survey may have written versions.
        (state.survey, state.files) = (survey, Some(files));
        self.tell(&mut state);
        Ok(())
    }

    /// Limits the caches of groups whose terms have changed. That may take long.
    fn limit_caches(&self, before: &Survey, now: &Survey) {
        let is_changed = |(group, held): &(&Group, &Held)| {
            before.held.get(*group).is_some_and(|before| before.edition != held.edition)
        };
        for (group, Held { agreement, .. }) in now.held.iter().filter(is_changed) {
            let (group, agreement) = (group.clone(), agreement.clone());
            let regions = self.regions.clone();
            tokio::task::spawn_blocking(move || {
                if let Err(error) = agreement.limit_caches(&regions) {
                    tracing::warn!(%group, "cannot limit its caches: {error}");
                }
            });
        }
    }

    /// Tells the other hosts what this one knows now, and the log of conflicts.
    fn tell(&self, state: &mut State) {
        if let Some(gossip) = &self.gossip {
            gossip.tell_agreements(state.digest());
        }
        let groups: BTreeSet<_> = state.catalog.lines().map(|(group, ..)| group.clone()).collect();
        for group in groups {
            let Some(problem) = state.conflict(&group) else { continue };
            state.warn(&self.journal, &group, crate::peers::with_help(&problem));
        }
        if state.catalog.is_full() && !std::mem::replace(&mut state.warned_full, true) {
            tracing::warn!(
                "this host knows {MOST_LINES} keys of groups, and takes in no new groups of other \
                 hosts: 'aquifer group list' shows which hosts made them"
            );
        }
    }
}

impl State {
    /// Warns an operator, once.
    fn warn(&mut self, journal: &Journal, group: &Group, what: String) {
        if self.warned.len() >= MOST_WARNINGS {
            self.warned.clear();
        }
        if self.warned.insert((group.clone(), what.clone())) {
            tracing::warn!(%group, "{what}");
            journal.decided_about_group(group, what);
        }
    }

    /// Returns whether nothing has changed since the last survey, and nothing waits for one.
    fn is_as(&self, files: &Files) -> bool {
        let is_removed = |(group, held): (&Group, &Held)| {
            self.survey.removed.contains(&(group.clone(), held.key))
        };
        self.files.as_ref() == Some(files) && !self.survey.held.iter().any(is_removed)
    }

    fn digest(&self) -> u64 {
        let line = |(group, key, line): (&Group, KeyId, &Line)| match line.state {
            KeyState::Agreed(edition) => {
                format!("{group} {key} {} {}\n", edition.version, edition.hash)
            }
            KeyState::Removed => format!("{group} {key}\n"),
        };
        digest(self.catalog.lines().map(line).collect::<String>().as_bytes())
    }

    fn known(&self) -> Known {
        let known = |(group, key, line): (&Group, KeyId, &Line)| KnownAgreement {
            group: group.clone(),
            key_id: key,
            edition: match line.state {
                KeyState::Agreed(edition) => Some(edition),
                KeyState::Removed => None,
            },
            by: line.by.clone(),
            hosts: line.hosts.clone(),
            held: self.survey.held.get(group).is_some_and(|held| {
                let state = KeyState::Agreed(held.edition);
                held.key == key && line.state == state && held.is_latest
            }),
            conflict: None,
        };
        Known { agreements: self.catalog.lines().map(known).collect() }
    }

    fn wanted(&self, own: &HostName) -> Vec<Wanted> {
        self.catalog.wanted(own, |group| {
            if self.survey.unreadable.contains(group) {
                return Holding::Unreadable;
            }
            let held = self.survey.held.get(group);
            held.map_or(Holding::Nothing, |held| Holding::Agreement(held.key, held.edition))
        })
    }

    /// Also returns whether this host wants the agreement.
    fn found(&self, group: &Group, inner: &Inner) -> Result<(Found, bool), Problem> {
        let found = self.survey.held.contains_key(group);
        if let Some(conflict) = self.conflict(group).filter(|_| !found) {
            return Err(conflict);
        }
        let live = self.catalog.live(group);
        let known_by = live.first().map(|(_, line)| line.by.clone());
        let is_wanted = self.wanted(&inner.own).iter().any(|wanted| wanted.group == *group);
        let directory = inner.agreements.directory().to_owned();
        Ok((Found { found, known_by, directory }, is_wanted))
    }

    /// Says that hosts of the cluster have different agreements with this name, if they do.
    fn conflict(&self, group: &Group) -> Option<Problem> {
        let live = self.catalog.live(group);
        let [(one_key, one), (other_key, other), ..] = live.as_slice() else { return None };
        Some(different(group, (&one.by, *one_key), (&other.by, *other_key)))
    }
}

/// Says that two hosts have different agreements with one name.
fn different(
    group: &Group,
    (one, one_key): (&HostName, KeyId),
    (other, other_key): (&HostName, KeyId),
) -> Problem {
    Problem {
        error: format!(
            "hosts {one} (key {one_key}) and {other} (key {other_key}) have different groups named \
             '{group}', and neither replaces the other"
        ),
        help: Some(format!(
            "remove one with 'aquifer group rm {group}' on its host; first stop that group's VMs, \
             or move its regions' data. If no host has it, use 'aquifer group rm {group} --key ID'"
        )),
    }
}

/// Returns the files in the directory of the agreements; none if it cannot be read.
fn files(agreements: &Agreements) -> Files {
    let entries = fs::read_dir(agreements.directory()).into_iter().flatten().flatten();
    let file = |entry: fs::DirEntry| {
        let metadata = entry.metadata().ok()?;
        Some((entry.path(), (metadata.ino(), metadata.modified().ok(), metadata.len())))
    };
    entries.filter_map(file).collect()
}
