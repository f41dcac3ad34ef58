//! The task that passes datagrams between the network and the state machine, and tells the agent
//! what changes.

use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aquifer_api::status::{EventKind, Standing};
use aquifer_membership::{About, Change, FORGOTTEN_AFTER, Known, Member, News, Now, Output};
use aquifer_page::{Bytes, HostName, LeaseId, lock};
use aquifer_transport::tls::Identity;
use tokio::net::UdpSocket;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::revoking::last_life;
use super::{ClusterDir, ClusterError, Key};
use crate::alarm::Alarm;
use crate::config::Config;
use crate::driver::{Command, Handle};
use crate::events::Events;
use crate::peers::{Follow, Peers};

/// The most bytes that a datagram can have.
const LARGEST: usize = 1 << 16;

/// How long a host that stops waits until its farewell is on the network.
const FAREWELL: Duration = Duration::from_millis(200);

/// The agent follows news at once if a host comes or goes, and else after this time.
const FOLLOW: Duration = Duration::from_secs(1);

/// The time between two looks for due timers, at least.
const TIMER_STEP: Duration = Duration::from_millis(10);

/// This host's part in the gossip of its cluster.
#[derive(Clone, Debug)]
pub(crate) struct Gossip {
    spare: Arc<watch::Sender<Bytes>>,
    agreements: Arc<watch::Sender<u64>>,
    revocations: Arc<watch::Sender<Option<u64>>>,
    keys: Arc<watch::Sender<Option<Key>>>,
    leave: mpsc::Sender<(bool, oneshot::Sender<()>)>,
    about: About,
    /// The last life of each host, also of those that have left.
    lives: Arc<Mutex<BTreeMap<HostName, u64>>>,
}

/// A host that is about to take part.
#[derive(Debug)]
pub(crate) struct Started {
    dir: ClusterDir,
    identity: Identity,
    /// Hosts that the previous agent knew, and that this one has not heard of.
    contacts: BTreeMap<HostName, SocketAddr>,
    socket: UdpSocket,
    machine: aquifer_membership::Gossip,
    alarm: Alarm,
    inbox: Inbox,
    begun: Instant,
    /// When the agent last followed the news.
    followed: Instant,
    /// The hosts that the agent and the disk know.
    passed_on: Option<BTreeMap<HostName, SocketAddr>>,
    /// The hosts on their way to the disk; the task returns whether they are there.
    saving: Option<JoinHandle<bool>>,
    lives: Arc<Mutex<BTreeMap<HostName, u64>>>,
}

/// The ends of the channels by which the agent tells the task what is new.
#[derive(Debug)]
struct Inbox {
    spare: watch::Receiver<Bytes>,
    agreements: watch::Receiver<u64>,
    revocations: watch::Receiver<Option<u64>>,
    keys: watch::Receiver<Option<Key>>,
    leave: mpsc::Receiver<(bool, oneshot::Sender<()>)>,
}

impl Gossip {
    /// Binds the address for datagrams; `None` if this host belongs to no cluster. Says nothing
    /// before [`Started::run`].
    ///
    /// # Errors
    /// If a file of the cluster is damaged, or the address is in use.
    pub(crate) async fn start(
        dir: &ClusterDir,
        Config { host, listen, zone, peers, .. }: &Config,
        identity: &Identity,
    ) -> Result<Option<(Self, Started)>, String> {
        let listen = *listen;
        let failed = |error: ClusterError| error.to_string();
        let Some(key) = dir.key().map_err(failed)? else {
            if dir.knows_hosts() || peers.is_empty() {
                tracing::warn!(
                    "{} lacks gossip.key: this host takes no part in a cluster. Restore the \
                     directory, or run 'aquifer cluster leave --force' and join again",
                    dir.path().display()
                );
            }
            return Ok(None);
        };
        if listen.ip().is_unspecified() {
            return Err(format!(
                "listen = \"{listen}\": the hosts of a cluster tell each other their addresses: \
                 name the one at which the others reach this host"
            ));
        }
        let socket = UdpSocket::bind(listen)
            .await
            .map_err(|error| format!("cannot listen on {listen} (UDP): {error}"))?;
        let alarm = Alarm::new().map_err(|error| format!("cannot make a timer: {error}"))?;
        let clock = u64::try_from(wall().as_millis()).unwrap_or(u64::MAX);
        // Without its files, a host finds the others as a new one does: from them.
        let life = dir.next_life(clock).unwrap_or_else(|error| warned(&error, clock));
        let own = Member { host: host.clone(), address: listen, life };
        // A random lease id is a random number.
        let random = LeaseId::random().0;
        let about = About { admits: dir.admits(), zone: zone.clone() };
        let mut machine = aquifer_membership::Gossip::new(own, about.clone(), key, random);
        let contacts = dir.members().unwrap_or_else(|error| warned(&error, BTreeMap::new()));
        let member = |(host, address): (&HostName, &SocketAddr)| Member {
            host: host.clone(),
            address: *address,
            life: 0,
        };
        machine.meet(contacts.iter().map(member));
        let (spare, spares) = watch::channel(Bytes::ZERO);
        let (agreements, digests) = watch::channel(0);
        // No digest at all is that of an older version.
        let (revocations, revoked) = watch::channel(None);
        let (keys, new_keys) = watch::channel(None);
        let (leave, leaves) = mpsc::channel(1);
        let started = Started {
            dir: dir.clone(),
            identity: identity.clone(),
            contacts,
            socket,
            machine,
            alarm,
            inbox: Inbox {
                spare: spares,
                agreements: digests,
                revocations: revoked,
                keys: new_keys,
                leave: leaves,
            },
            begun: Instant::now(),
            followed: Instant::now(),
            passed_on: None,
            saving: None,
            lives: Arc::default(),
        };
        let lives = started.lives.clone();
        let (spare, agreements) = (Arc::new(spare), Arc::new(agreements));
        let (revocations, keys) = (Arc::new(revocations), Arc::new(keys));
        Ok(Some((Self { spare, agreements, revocations, keys, leave, about, lives }, started)))
    }

    /// Returns whether this host can admit others.
    pub(crate) fn admits(&self) -> bool {
        self.about.admits
    }

    /// Returns the last life of a host that is or was in the cluster.
    pub(crate) fn last_life(&self, host: &HostName) -> Option<u64> {
        lock(&self.lives).get(host).copied()
    }

    /// Tells the other hosts what this one can spare, if that is news.
    pub(crate) fn tell(&self, spare: Bytes) {
        self.spare.send_if_modified(|told| std::mem::replace(told, spare) != spare);
    }

    /// Tells the other hosts a digest of what this one knows of agreements, if that is news.
    pub(crate) fn tell_agreements(&self, digest: u64) {
        self.agreements.send_if_modified(|told| std::mem::replace(told, digest) != digest);
    }

    /// Tells the other hosts a digest of the revocations that this one knows, if that is news.
    pub(crate) fn tell_revocations(&self, digest: u64) {
        self.revocations.send_if_modified(|told| told.replace(digest) != Some(digest));
    }

    /// Seals with another key from now on.
    pub(crate) fn change_key(&self, key: Key) {
        self.keys.send_replace(Some(key));
    }

    /// Tells the other hosts that this one stops, or that it leaves for good.
    pub(crate) async fn leave(&self, for_good: bool) {
        let (done, told) = oneshot::channel();
        if self.leave.send((for_good, done)).await.is_ok() {
            let _ = tokio::time::timeout(FAREWELL, told).await;
        }
    }
}

impl Started {
    /// Takes part until the caller drops the future.
    pub(crate) async fn run(mut self, peers: Peers, events: Events, agent: Handle) {
        let mut buffer = vec![0; LARGEST];
        let mut complained = HashSet::new();
        loop {
            let wakes_at = self.machine.wakes_at().map(|at| (self.begun + coarse(at)).into_std());
            let outputs = tokio::select! {
                received = self.socket.recv_from(&mut buffer) => match received {
                    Ok((length, from)) => {
                        let now = self.now();
                        self.machine.receive(&buffer[..length], now).unwrap_or_else(|error| {
                            // Anyone can send datagrams: the log shows the first of each kind.
                            if complained.insert(error) {
                                tracing::warn!(%from, "ignored a datagram: {error}");
                            }
                            Vec::new()
                        })
                    }
                    Err(error) => {
                        tracing::debug!("cannot receive datagrams: {error}");
                        tokio::time::sleep(FAREWELL).await;
                        Vec::new()
                    }
                },
                () = self.alarm.wait(wakes_at) => {
                    let now = self.now();
                    self.machine.tick(now)
                }
                Ok(()) = self.inbox.spare.changed() => {
                    let spare = *self.inbox.spare.borrow_and_update();
                    let now = self.now();
                    self.machine.tell(spare, now)
                }
                Ok(()) = self.inbox.agreements.changed() => {
                    let digest = *self.inbox.agreements.borrow_and_update();
                    let now = self.now();
                    self.machine.tell_agreements(digest, now)
                }
                Ok(()) = self.inbox.revocations.changed() => {
                    let digest = *self.inbox.revocations.borrow_and_update();
                    let now = self.now();
                    let told = digest.map(|digest| self.machine.tell_revocations(digest, now));
                    told.unwrap_or_default()
                }
                Ok(()) = self.inbox.keys.changed() => {
                    let key = self.inbox.keys.borrow_and_update().clone();
                    let now = self.now();
                    if let Some(key) = key {
                        self.machine.change_key(key, LeaseId::random().0, now);
                    }
                    Vec::new()
                }
                Some((for_good, done)) = self.inbox.leave.recv() => {
                    let now = self.now();
                    let farewell = self.machine.leave(for_good, now);
                    self.perform(farewell, &peers, &events, &agent).await;
                    let _ = done.send(());
                    return;
                }
            };
            self.perform(outputs, &peers, &events, &agent).await;
        }
    }

    fn now(&self) -> Now {
        Now { steady: self.begun.elapsed(), wall: wall() }
    }

    /// Returns what is known of the other hosts, and of those that left.
    pub(crate) fn others(&mut self) -> BTreeMap<HostName, Follow> {
        let known = self.machine.others();
        self.contacts.retain(|host, _| known.iter().all(|known| known.member.host != *host));
        if self.begun.elapsed() > FORGOTTEN_AFTER {
            self.contacts.clear();
        }
        let unheard = self.contacts.iter().map(|(host, address)| {
            let down = Follow {
                address: *address,
                standing: Standing::Down,
                about: About::default(),
                spare: None,
                agreements: None,
                revocations: None,
            };
            (host.clone(), down)
        });
        let left = self.machine.left();
        let left = left.iter().map(|known| {
            let (host, follow) = follow(known);
            (host, Follow { standing: Standing::Left, ..follow })
        });
        let mut others: BTreeMap<_, _> =
            unheard.chain(left).chain(known.iter().map(follow)).collect();
        // Its agent may still run, and have the former key.
        let revoked = self.identity.revocations();
        for known in &known {
            let revoked = revoked.until(&known.member.host).map(last_life);
            if revoked.is_some_and(|last| known.member.life <= last)
                && let Some(other) = others.get_mut(&known.member.host)
            {
                other.standing = Standing::Left;
            }
        }
        others
    }

    async fn perform(
        &mut self,
        outputs: Vec<Output>,
        peers: &Peers,
        events: &Events,
        agent: &Handle,
    ) {
        let mut changes = Vec::new();
        for output in outputs {
            match output {
                Output::Change(change) => changes.push(change),
                Output::Send { to, datagram } => {
                    if let Err(error) = self.socket.send_to(&datagram, to).await {
                        tracing::debug!(%to, "cannot send a datagram: {error}");
                    }
                }
            }
        }
        changes.iter().for_each(|change| note(change, events, agent));
        if !changes.is_empty() || self.followed.elapsed() >= FOLLOW {
            self.follow(peers, agent).await;
        }
    }

    /// Makes the agent follow what is known of the others. What cannot be passed on now is passed
    /// on the next time: gossip waits for neither the disk nor a busy agent.
    async fn follow(&mut self, peers: &Peers, agent: &Handle) {
        self.followed = Instant::now();
        let others = self.others();
        *lock(&self.lives) = self.machine.lives();
        peers.follow(&others);
        let stay = others.into_iter().filter(|(_, follow)| follow.standing != Standing::Left);
        let addresses: BTreeMap<_, _> = stay.map(|(host, follow)| (host, follow.address)).collect();
        match self.saving.as_ref().map(JoinHandle::is_finished) {
            Some(false) => return,
            Some(true) if !self.saved().await => self.passed_on = None,
            _ => {}
        }
        if self.passed_on.as_ref() == Some(&addresses) {
            return;
        }
        if agent.0.try_send(Command::Peers(peers.known())).is_ok() {
            self.passed_on = Some(addresses.clone());
            let dir = self.dir.clone();
            self.saving = Some(tokio::task::spawn_blocking(move || {
                let kept = dir.keep_members(&addresses);
                kept.map_err(|error| warned(&error, ())).is_ok()
            }));
        }
    }

    /// Returns whether the hosts that were on their way to the disk are there.
    async fn saved(&mut self) -> bool {
        match self.saving.take() {
            Some(saving) => saving.await.unwrap_or(false),
            None => true,
        }
    }
}

/// Logs the failure of a file without which this host may not find its cluster after a restart.
fn warned<T>(error: &ClusterError, instead: T) -> T {
    tracing::warn!("{error}: after a restart, this host may not find its cluster");
    instead
}

fn note(change: &Change, events: &Events, agent: &Handle) {
    match change {
        Change::Up(host) => {
            let what = format!("{} is up at {}", host.host, host.address);
            events.note(EventKind::HostUp, &host.host, what);
            ask_for_leases(host, agent);
        }
        Change::Anew(host) => ask_for_leases(host, agent),
        Change::Down(host) => {
            let Member { host, address, .. } = host.clone();
            // If the agent is too busy to say what this concerns, the event says the rest.
            let told = agent.0.try_send(Command::HostDown { host: host.clone(), address });
            if told.is_err() {
                let what = format!("{host} at {address} answers no host, or stopped");
                events.note(EventKind::HostDown, &host, what);
            }
        }
        Change::NameTaken(twin) => {
            let what = format!(
                "the host at {} also has the name {}: stop its agent, and join it under another \
                 name",
                twin.address, twin.host
            );
            events.note(EventKind::NameTaken, &twin.host, what);
        }
    }
}

/// Makes the agent ask a host, the agent of which may have started again, for its leases. If this
/// host's agent is busy, it asks later by itself.
fn ask_for_leases(host: &Member, agent: &Handle) {
    let _ = agent.0.try_send(Command::HostAnew(host.host.clone()));
}

fn follow(known: &Known) -> (HostName, Follow) {
    let (news, is_alive) = (known.news.as_ref(), known.is_alive());
    let about = news.map(|news| news.about.clone()).unwrap_or_default();
    let follow = Follow {
        address: known.member.address,
        standing: if is_alive { Standing::Up } else { Standing::Down },
        about: About { admits: about.admits && is_alive, ..about },
        spare: news.filter(|_| is_alive).map(News::spare),
        agreements: news.filter(|_| is_alive).and_then(|news| news.agreements),
        revocations: news.filter(|_| is_alive).and_then(|news| news.revocations),
    };
    (known.member.host.clone(), follow)
}

/// Returns the next time at which the state machine may look: those close together become one.
fn coarse(at: Duration) -> Duration {
    let look = TIMER_STEP.as_nanos() as u64;
    Duration::from_nanos((at.as_nanos() as u64).next_multiple_of(look))
}

fn wall() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
