//! The state machine: datagrams and the time in, datagrams and changes out.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::net::SocketAddr;
use std::time::Duration;

use aquifer_page::{Bytes, HostName};
use foca::{Foca, Notification, Runtime, State, Timer};
use rand::SeedableRng as _;
use rand::rngs::SmallRng;

use crate::config::config;
use crate::member::Member;
use crate::news::{About, Board, News, Receiver};
use crate::seal::{Key, Opener, SealError, Sealer};
use crate::watch::Watch;

/// The news of a host are told again after this time, for hosts that missed them.
const REFRESH: Duration = Duration::from_secs(30);

/// A host that hears from nobody calls on all that it knows of, again after this time.
const RETRY: Duration = Duration::from_secs(2);

/// How long hosts may take to learn the cluster's new key from each other.
const KEY_CHANGE: Duration = Duration::from_secs(3);

/// The time, by two clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// The time since any moment; this clock is never set.
    pub steady: Duration,
    /// The time since 1970.
    pub wall: Duration,
}

/// What the shell must do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Send a datagram.
    Send {
        /// The agent that gets it.
        to: SocketAddr,
        /// The sealed content.
        datagram: Vec<u8>,
    },
    /// Note a change.
    Change(Change),
}

/// A change in the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A host is up: a new one, one that comes back, or one with another address.
    Up(Member),
    /// A host that is up began another life: its agent started again, or others took it for down.
    Anew(Member),
    /// A host left, or answers nobody.
    Down(Member),
    /// Another host has this host's name.
    NameTaken(Member),
}

/// A host, as this one knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// The host.
    pub member: Member,
    /// Whether it lives, as far as is known.
    pub state: State,
    /// Its latest news.
    pub news: Option<News>,
}

impl Known {
    /// Returns whether the host lives, as far as is known.
    pub fn is_alive(&self) -> bool {
        self.state != State::Down
    }

    fn has_left(&self) -> bool {
        !self.is_alive() && self.news.as_ref().is_some_and(|news| news.leaves)
    }
}

/// One host's part in the gossip.
pub struct Gossip {
    foca: Foca<Member, Watch, SmallRng, Receiver>,
    collected: Collected,
    timers: BinaryHeap<Reverse<Due>>,
    sealer: Sealer,
    opener: Opener,
    /// Opens what hosts sealed before they had the present key, until this steady time.
    former: Option<(Opener, Duration)>,
    board: Board,
    watch: Watch,
    own: News,
    told_at: Duration,
    /// Hosts that may know others.
    contacts: Vec<Member>,
    /// While this host hears from nobody: when to call on others.
    retry_at: Option<Duration>,
}

impl std::fmt::Debug for Gossip {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gossip").field("own", &self.own).finish_non_exhaustive()
    }
}

/// A timer, and when it fires. Foca orders timers of the same moment.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Due(Duration, Timer<Member>);

/// What foca asked for during a call.
#[derive(Debug, Default)]
struct Collected {
    sends: Vec<(SocketAddr, Vec<u8>)>,
    timers: Vec<(Duration, Timer<Member>)>,
    changes: Vec<Change>,
    /// Others may lack this host's news.
    news_needed: bool,
    /// Whether this host began or ceased to hear from others.
    heard: Option<bool>,
}

impl Runtime<Member> for &mut Collected {
    fn notify(&mut self, notification: Notification<'_, Member>) {
        match notification {
            Notification::MemberUp(member) => {
                self.changes.push(Change::Up(member.clone()));
                self.news_needed = true;
            }
            Notification::MemberDown(member) => self.changes.push(Change::Down(member.clone())),
            // If the host was down, `MemberUp` follows. In a new life, it may lack the news of
            // others.
            Notification::Rename(before, after) => {
                self.news_needed = true;
                self.changes.push(match before.address == after.address {
                    true => Change::Anew(after.clone()),
                    false => Change::Up(after.clone()),
                });
            }
            Notification::Rejoin(_) => (self.news_needed, self.heard) = (true, Some(false)),
            Notification::Active => self.heard = Some(true),
            Notification::Idle | Notification::Defunct => self.heard = Some(false),
        }
    }

    fn send_to(&mut self, to: Member, data: &[u8]) {
        self.sends.push((to.address, data.to_vec()));
    }

    fn submit_after(&mut self, event: Timer<Member>, after: Duration) {
        self.timers.push((after, event));
    }
}

impl Gossip {
    /// Begins the part of the host `own`, which nobody has heard of yet. `random` seeds choices and
    /// names this process: two processes must not have the same.
    pub fn new(own: Member, about: About, key: Key, random: u128) -> Self {
        let (board, watch) = (Board::default(), Watch::new(own.clone()));
        let receiver =
            Receiver { own: own.host.clone(), board: board.clone(), watch: watch.clone() };
        let mut seed = [0; 32];
        seed[..16].copy_from_slice(&random.to_be_bytes());
        let (rng, codec) = (SmallRng::from_seed(seed), watch.clone());
        let news = News::first(own.clone(), about);
        Self {
            foca: Foca::with_custom_broadcast(own, config(), rng, codec, receiver),
            collected: Collected::default(),
            timers: BinaryHeap::new(),
            sealer: Sealer::new(&key, random),
            opener: Opener::new(key),
            former: None,
            board,
            watch,
            own: news,
            told_at: Duration::ZERO,
            contacts: Vec::new(),
            retry_at: Some(Duration::ZERO),
        }
    }

    /// Names hosts that may know others. This host calls on them until it hears from one.
    pub fn meet(&mut self, contacts: impl IntoIterator<Item = Member>) {
        self.contacts.extend(contacts);
    }

    /// Takes a datagram in.
    ///
    /// # Errors
    /// If it is not from a host of the cluster, came before, or is old. Nothing has changed then.
    pub fn receive(&mut self, datagram: &[u8], now: Now) -> Result<Vec<Output>, SealError> {
        self.former.take_if(|(_, until)| *until <= now.steady);
        let opened = match (self.opener.open(datagram, now.wall), &mut self.former) {
            (Err(SealError::Foreign), Some((former, _))) => former.open(datagram, now.wall),
            (opened, _) => opened,
        }?;
        // A host of another version may send what foca does not understand; it takes nothing of it.
        let _ = self.foca.handle_data(&opened.0, &mut self.collected);
        Ok(self.outputs(now))
    }

    /// Replaces the cluster's key. Datagrams under the former one count for some seconds more,
    /// until all hosts have the new one. `random` is as for [`Gossip::new`].
    pub fn change_key(&mut self, key: Key, random: u128, now: Now) {
        self.sealer = Sealer::new(&key, random);
        let former = std::mem::replace(&mut self.opener, Opener::new(key));
        self.former = Some((former, now.steady.saturating_add(KEY_CHANGE)));
    }

    /// Returns the steady time at which to call [`Gossip::tick`] next. A timer that would do
    /// nothing now waits for the next one: an idle host wakes up for probes only.
    pub fn wakes_at(&self) -> Option<Duration> {
        let has_work = |Reverse(Due(at, timer)): &Reverse<Due>| {
            let has_work = match timer {
                Timer::PeriodicGossip(_) => {
                    self.foca.updates_backlog() + self.foca.custom_broadcast_backlog() > 0
                }
                Timer::SendIndirectProbe { .. } => self.watch.awaits_answer(),
                _ => true,
            };
            has_work.then_some(*at)
        };
        self.timers.iter().filter_map(has_work).chain(self.retry_at).min()
    }

    /// Does what is due.
    pub fn tick(&mut self, now: Now) -> Vec<Output> {
        let mut due = Vec::new();
        while self.timers.peek().is_some_and(|Reverse(Due(at, _))| *at <= now.steady) {
            due.extend(self.timers.pop().map(|Reverse(Due(_, timer))| timer));
        }
        // After a pause, all are due: foca wants them in its order.
        due.sort();
        for timer in due {
            let _ = self.foca.handle_timer(timer, &mut self.collected);
        }
        if self.retry_at.is_some_and(|at| at <= now.steady) {
            self.retry_at = Some(now.steady.saturating_add(RETRY));
            let known = self.foca.iter_membership_state().map(|member| member.id().clone());
            for contact in self.contacts.iter().cloned().chain(known).collect::<BTreeSet<_>>() {
                // Foca fails only if the host does not fit a datagram.
                let _ = self.foca.announce(contact, &mut self.collected);
            }
        }
        if now.steady.saturating_sub(self.told_at) >= REFRESH {
            self.collected.news_needed = true;
            let known = self.foca.iter_membership_state().map(|member| member.id().host.clone());
            self.board.keep(&known.chain([self.own.of.host.clone()]).collect());
        }
        self.outputs(now)
    }

    /// Tells all hosts what this one can spare, unless that is no news.
    pub fn tell(&mut self, spare: Bytes, now: Now) -> Vec<Output> {
        self.collected.news_needed |= self.own.set_spare(spare);
        self.outputs(now)
    }

    /// Tells all hosts a digest of what this one knows of agreements, unless that is no news.
    pub fn tell_agreements(&mut self, digest: u64, now: Now) -> Vec<Output> {
        let is_news = self.own.agreements.replace(digest) != Some(digest);
        self.collected.news_needed |= is_news;
        self.outputs(now)
    }

    /// Tells all hosts a digest of the revocations that this one knows, unless that is no news.
    pub fn tell_revocations(&mut self, digest: u64, now: Now) -> Vec<Output> {
        let is_news = self.own.revocations.replace(digest) != Some(digest);
        self.collected.news_needed |= is_news;
        self.outputs(now)
    }

    /// Tells all hosts that this one stops. If it leaves for good, they forget it at once.
    pub fn leave(&mut self, for_good: bool, now: Now) -> Vec<Output> {
        if for_good {
            self.own.leaves = true;
            self.tell_news(now);
        }
        let _ = self.foca.leave_cluster(&mut self.collected);
        let outputs = self.outputs(now);
        self.retry_at = None;
        outputs
    }

    /// Returns this host as others know it.
    pub fn own(&self) -> &Member {
        self.foca.identity()
    }

    /// Returns the other hosts of the cluster, by name.
    pub fn others(&self) -> Vec<Known> {
        self.known(|known| !known.has_left())
    }

    /// Returns the hosts that left the cluster for good less than a day ago, by name.
    pub fn left(&self) -> Vec<Known> {
        self.known(Known::has_left)
    }

    fn known(&self, which: impl Fn(&Known) -> bool) -> Vec<Known> {
        let known = |member: &foca::Member<Member>| Known {
            member: member.id().clone(),
            state: member.state(),
            news: self.board.of(&member.id().host),
        };
        let all = self.foca.iter_membership_state().map(known);
        let mut all: Vec<_> = all.filter(which).collect();
        all.sort_by(|a, b| a.member.cmp(&b.member));
        all
    }

    /// Returns the last life of each other host, also of those that have left.
    pub fn lives(&self) -> BTreeMap<HostName, u64> {
        let mut lives = BTreeMap::new();
        for member in self.foca.iter_membership_state().map(|member| member.id()) {
            let life = lives.entry(member.host.clone()).or_default();
            *life = member.life.max(*life);
        }
        lives
    }

    fn outputs(&mut self, now: Now) -> Vec<Output> {
        if std::mem::take(&mut self.collected.news_needed) {
            self.tell_news(now);
        }
        self.watch.lives_as(self.foca.identity());
        match self.collected.heard {
            Some(true) => self.retry_at = None,
            Some(false) => self.retry_at = Some(now.steady.saturating_add(RETRY)),
            None => {}
        }
        let Collected { sends, timers, changes, .. } = std::mem::take(&mut self.collected);
        let due = |(after, timer)| Reverse(Due(now.steady.saturating_add(after), timer));
        self.timers.extend(timers.into_iter().map(due));
        let mut outputs: Vec<_> = changes.into_iter().map(Output::Change).collect();
        outputs.extend(self.watch.twin().map(Change::NameTaken).map(Output::Change));
        let sealer = &mut self.sealer;
        outputs.extend(
            sends.into_iter().map(|(to, content)| Output::Send {
                to,
                datagram: sealer.seal(&content, now.wall),
            }),
        );
        outputs
    }

    fn tell_news(&mut self, now: Now) {
        self.own.of = self.foca.identity().clone();
        self.own.number += 1;
        self.told_at = now.steady;
        if let Ok(news) = postcard::to_allocvec(&self.own) {
            let _ = self.foca.add_broadcast(&news);
        }
    }
}
