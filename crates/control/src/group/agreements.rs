//! The agreements of a cluster's groups: what all hosts know of them, and which host asks which.
//!
//! A [`Catalog`] has one line for each key of a group, and no key. Merging two catalogs gives the
//! same result in any order and any number of times, so all hosts end with the same one. A newer
//! [`Edition`] replaces an older one of the same key. A removed key stays removed: a key is random,
//! so a group that is created again has another one. Two live keys of one group are a conflict,
//! which only an operator can end: whatever the loser's key encrypted would be unreadable.
//!
//! Each host gossips a digest of its catalog. [`Asking`] decides when a host asks another one for
//! its catalog: once for each digest that the host has not seen.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use aquifer_page::{Group, HostName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The most lines of a catalog: a host that lies must not fill the memory or disk of the others.
pub const MOST_LINES: usize = 4096;

/// The most bytes of a list of hosts, for the same reason.
const LONGEST_LIST: usize = 1000;

/// How many digests a host remembers. For a forgotten one it asks once more.
const MOST_DIGESTS: usize = 1024;

/// How far a version may be above the known one: versions that a liar announces must not run out.
pub const LARGEST_STEP: u64 = 1 << 20;

/// Hosts spread their questions over this time per host of the cluster.
const ASK_SPREAD_PER_HOST: Duration = Duration::from_millis(5);

/// How long a host is not asked again after its first failure. Each further one doubles it.
const FIRST_PAUSE: Duration = Duration::from_secs(2);

/// The longest such pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// A text that is not 16 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotHex;

impl fmt::Display for NotHex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it needs 16 hexadecimal digits")
    }
}

impl std::error::Error for NotHex {}

macro_rules! hex {
    ($(#[$doc:meta])* $type:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $type(pub u64);

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:016x}", self.0)
            }
        }

        impl FromStr for $type {
            type Err = NotHex;

            fn from_str(text: &str) -> Result<Self, NotHex> {
                let is_hex = text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
                let number = is_hex.then(|| u64::from_str_radix(text, 16).ok()).flatten();
                number.map(Self).ok_or(NotHex)
            }
        }

        impl TryFrom<String> for $type {
            type Error = NotHex;

            fn try_from(text: String) -> Result<Self, NotHex> {
                text.parse()
            }
        }

        impl From<$type> for String {
            fn from(number: $type) -> String {
                number.to_string()
            }
        }
    };
}

hex!(
    /// An id of a group's key, by which hosts compare keys without showing them.
    KeyId
);
hex!(
    /// A hash of an agreement's terms and key.
    TermsHash
);

/// A version of an agreement. Of two with the same number, the hash decides.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
pub struct Edition {
    /// The version, from 1.
    pub version: u64,
    /// Tells two versions with the same number apart: 16 hexadecimal digits.
    #[schema(value_type = String)]
    pub hash: TermsHash,
}

/// The state of a key. The later case wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// The group has an agreement with this key.
    Agreed(Edition),
    /// An operator removed the agreement.
    Removed,
}

/// A line of a catalog, besides the group and the id of its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// The key's state.
    pub state: State,
    /// The host where an operator made it so.
    pub by: HostName,
    /// The hosts that may have the agreement, as in [`is_listed`].
    pub hosts: Vec<String>,
}

impl Line {
    /// Returns whether the two lines of one key are different versions with the same number.
    pub fn is_rival(&self, other: &Self) -> bool {
        match (self.state, other.state) {
            (State::Agreed(one), State::Agreed(other)) => {
                one.version == other.version && one.hash != other.hash
            }
            _ => false,
        }
    }
}

/// Returns whether a list names `name`: a trailing `*` matches any text, and an empty list all.
pub fn is_listed(list: &[String], name: &str) -> bool {
    let matches = |item: &String| match item.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => name == item,
    };
    list.is_empty() || list.iter().any(matches)
}

/// Returns whether a list of hosts is short enough for a catalog.
pub fn is_short(list: &[String]) -> bool {
    // Each name also takes two quotes and a comma.
    list.iter().map(|name| name.len() + 3).sum::<usize>() <= LONGEST_LIST
}

/// Returns whether a version is at most [`LARGEST_STEP`] above the known one.
fn is_near(known: Option<&Line>, state: State) -> bool {
    let version = |state| match state {
        State::Agreed(Edition { version, .. }) => version,
        State::Removed => 0,
    };
    let known = known.map_or(0, |known| version(known.state));
    version(state) <= known.saturating_add(LARGEST_STEP)
}

/// What a host has of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holding {
    /// No file.
    Nothing,
    /// A file that holds no agreement. It stays as it is.
    Unreadable,
    /// An agreement.
    Agreement(KeyId, Edition),
}

/// What hosts know of all agreements.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Catalog(BTreeMap<Group, BTreeMap<KeyId, Line>>);

impl Catalog {
    /// Takes in a line of another host if [`Self::admits`]; returns whether it did.
    pub fn merge(&mut self, group: &Group, key: KeyId, line: Line) -> bool {
        let is_admitted = self.admits(group, key, &line);
        if is_admitted {
            self.0.entry(group.clone()).or_default().insert(key, line);
        }
        is_admitted
    }

    /// Takes in a line of this host's own files, also if the catalog is full.
    pub fn hold(&mut self, group: &Group, key: KeyId, line: Line) {
        if self.line(group, key).is_none_or(|known| known.state < line.state) {
            self.0.entry(group.clone()).or_default().insert(key, line);
        }
    }

    /// Returns whether a line of another host is news, and within all limits. A full catalog takes
    /// in no new keys.
    pub fn admits(&self, group: &Group, key: KeyId, line: &Line) -> bool {
        let known = self.line(group, key);
        let is_news = known.map_or(!self.is_full(), |known| known.state < line.state);
        is_news && is_short(&line.hosts) && is_near(known, line.state)
    }

    /// Returns whether the catalog takes in no new keys.
    pub fn is_full(&self) -> bool {
        self.0.values().map(BTreeMap::len).sum::<usize>() >= MOST_LINES
    }

    /// Returns all lines, by group and key.
    pub fn lines(&self) -> impl Iterator<Item = (&Group, KeyId, &Line)> {
        self.0
            .iter()
            .flat_map(|(group, keys)| keys.iter().map(move |(key, line)| (group, *key, line)))
    }

    /// Returns the line of a key.
    pub fn line(&self, group: &Group, key: KeyId) -> Option<&Line> {
        self.0.get(group)?.get(&key)
    }

    /// Returns whether an operator has removed this key.
    pub fn is_removed(&self, group: &Group, key: KeyId) -> bool {
        self.line(group, key).is_some_and(|line| line.state == State::Removed)
    }

    /// Returns the latest version of an agreement, if no operator removed it.
    pub fn latest(&self, group: &Group, key: KeyId) -> Option<Edition> {
        match self.line(group, key)?.state {
            State::Agreed(edition) => Some(edition),
            State::Removed => None,
        }
    }

    /// Returns the keys of a group that are not removed. More than one are a conflict.
    pub fn live(&self, group: &Group) -> Vec<(KeyId, &Line)> {
        let keys = self.0.get(group).into_iter().flatten();
        let keys = keys.filter(|(_, line)| line.state != State::Removed);
        keys.map(|(key, line)| (*key, line)).collect()
    }

    /// Returns the agreements that `own` lacks, has in an older version, and may have.
    pub fn wanted(&self, own: &HostName, holds: impl Fn(&Group) -> Holding) -> Vec<Wanted> {
        let wanted = |group: &Group| {
            let (live, holding) = (self.live(group), holds(group));
            let (key, line) = match holding {
                Holding::Unreadable => return None,
                Holding::Nothing => match live.as_slice() {
                    [(key, line)] => (*key, *line),
                    _ => return None,
                },
                Holding::Agreement(key, _) => *live.iter().find(|(live, _)| *live == key)?,
            };
            let State::Agreed(edition) = line.state else { return None };
            let has = matches!(holding, Holding::Agreement(_, has) if has >= edition);
            (!has && is_listed(&line.hosts, own.as_str())).then(|| Wanted {
                group: group.clone(),
                key,
                edition,
                by: line.by.clone(),
                hosts: line.hosts.clone(),
            })
        };
        self.0.keys().filter_map(wanted).collect()
    }
}

/// An agreement that a host needs from another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The group.
    pub group: Group,
    /// The id of its key.
    pub key: KeyId,
    /// The least edition.
    pub edition: Edition,
    /// The host where an operator made it.
    pub by: HostName,
    /// The hosts that may have it.
    pub hosts: Vec<String>,
}

impl Wanted {
    /// Returns whether an agreement with this name and version answers the question.
    pub fn is_answered_by(&self, group: &Group, edition: Edition) -> bool {
        let most = self.edition.version.saturating_add(LARGEST_STEP);
        *group == self.group && edition >= self.edition && edition.version <= most
    }

    /// Returns whether this host may have it.
    fn may_be_at(&self, host: &HostName) -> bool {
        *host == self.by || is_listed(&self.hosts, host.as_str())
    }
}

/// What a host does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// It waits for news.
    Nothing,
    /// It decides again at this time.
    At(Duration),
    /// It asks this host for its catalog, and for the agreements that it wants.
    Ask(HostName),
}

/// A host that did not answer, or lacked what this host wants.
#[derive(Clone, Copy, Debug)]
struct Failure {
    /// The digest that it told. With another one it is asked again at once.
    digest: u64,
    until: Duration,
    pause: Duration,
}

/// When a host asks another for its catalog.
#[derive(Clone, Debug, Default)]
pub struct Asking {
    /// Digests of catalogs that hold nothing new for this host.
    seen: BTreeSet<u64>,
    /// The same, oldest first.
    order: VecDeque<u64>,
    failed: BTreeMap<HostName, Failure>,
    due: Option<Duration>,
    /// The agreements that the last host asked did not have. While they are all that this host
    /// wants, it asks no host for them until then.
    lacking: Option<Lacking>,
}

/// Agreements that no host asked so far has.
#[derive(Clone, Debug)]
struct Lacking {
    wanted: Vec<Wanted>,
    until: Duration,
    pause: Duration,
}

impl Asking {
    /// Decides. `own` is the digest of this host's catalog, and `told` has those of the hosts that
    /// are up; `random` is a random number.
    pub fn next(
        &mut self,
        now: Duration,
        (own, wanted): (u64, &[Wanted]),
        told: &BTreeMap<HostName, u64>,
        random: u64,
    ) -> Next {
        self.failed.retain(|host, failure| told.get(host) == Some(&failure.digest));
        if wanted.is_empty() {
            self.see(own);
        }
        if self.lacking.as_ref().is_some_and(|lacking| lacking.wanted != wanted) {
            self.lacking = None;
        }
        let lacking_until = self.lacking.as_ref().map_or(Duration::ZERO, |lacking| lacking.until);
        // From when on to ask a host; `None` if it has nothing for this one.
        let from = |(host, digest): (&HostName, &u64)| {
            let failed_until = self.failed.get(host).map_or(Duration::ZERO, |failed| failed.until);
            if !self.seen.contains(digest) && (wanted.is_empty() || *digest != own) {
                return Some((host.clone(), failed_until));
            }
            let may = wanted.iter().any(|wanted| wanted.may_be_at(host));
            may.then(|| (host.clone(), failed_until.max(lacking_until)))
        };
        let (paused, ready): (Vec<_>, Vec<_>) =
            told.iter().filter_map(from).partition(|(_, from)| *from > now);
        // First those that have failed least.
        let pause = |host: &HostName| self.failed.get(host).map(|failed| failed.pause);
        let least = ready.iter().map(|(host, _)| pause(host)).min();
        let ready: Vec<_> = ready.iter().filter(|(host, _)| Some(pause(host)) == least).collect();
        let Some(last) = ready.len().checked_sub(1) else {
            self.due = None;
            let until = paused.iter().map(|(_, from)| *from).min();
            return until.map_or(Next::Nothing, Next::At);
        };
        let spread = u64::try_from(ASK_SPREAD_PER_HOST.as_millis()).unwrap_or(u64::MAX);
        let spread = spread.saturating_mul(told.len() as u64).max(1);
        let due = *self.due.get_or_insert(now + Duration::from_millis(random % spread));
        if due > now {
            return Next::At(due);
        }
        self.due = None;
        let chosen = usize::try_from(random / spread).unwrap_or_default() % (last + 1);
        Next::Ask(ready[chosen].0.clone())
    }

    /// Notes that this host has merged the catalog of `host`, and which agreements it still lacks.
    pub fn answered(&mut self, now: Duration, host: &HostName, digest: u64, wanted: &[Wanted]) {
        if wanted.is_empty() {
            self.failed.remove(host);
            self.see(digest);
            self.lacking = None;
            return;
        }
        self.failed(now, host, digest);
        let before = self.lacking.take().filter(|lacking| lacking.wanted == wanted);
        let pause = longer(before.map(|lacking| lacking.pause));
        self.lacking = Some(Lacking { wanted: wanted.to_vec(), until: now + pause, pause });
    }

    /// Notes that `host`, which told this digest, did not answer, or answered wrongly.
    pub fn failed(&mut self, now: Duration, host: &HostName, digest: u64) {
        let pause = longer(self.failed.get(host).map(|failure| failure.pause));
        self.failed.insert(host.clone(), Failure { digest, until: now + pause, pause });
    }

    /// Makes the next decision without the wait that spreads the asking, and without the pause
    /// after hosts that lacked what this host wants.
    pub fn hurry(&mut self) {
        self.due = Some(Duration::ZERO);
        if let Some(lacking) = &mut self.lacking {
            lacking.until = Duration::ZERO;
        }
    }

    /// Ends the pauses after failures: a command waits.
    pub fn retry(&mut self) {
        self.failed.values_mut().for_each(|failure| failure.until = Duration::ZERO);
    }

    fn see(&mut self, digest: u64) {
        if self.seen.insert(digest) {
            self.order.push_back(digest);
        }
        if self.order.len() > MOST_DIGESTS
            && let Some(oldest) = self.order.pop_front()
        {
            self.seen.remove(&oldest);
        }
    }
}

/// Returns the pause after this one.
fn longer(pause: Option<Duration>) -> Duration {
    pause.map_or(FIRST_PAUSE, |pause| (pause * 2).min(LONGEST_PAUSE))
}
