//! Clusters in a heap of events, over a network that delays and loses.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::net::SocketAddr;
use std::time::Duration;

use aquifer_membership::{About, Change, Gossip, Key, Known, Member, Now, Output};
use aquifer_page::{Bytes, EXTENT_SIZE};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

const MILLI: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Arrival, number, receiver and content of a datagram.
type OnTheWay = (Duration, u64, SocketAddr, Vec<u8>);

struct Cluster {
    now: Duration,
    hosts: BTreeMap<SocketAddr, Gossip>,
    /// Datagrams by the time at which they arrive.
    network: BinaryHeap<Reverse<OnTheWay>>,
    sent: u64,
    bytes: usize,
    changes: Vec<(Duration, SocketAddr, Change)>,
    rng: SmallRng,
    /// Of 1000 datagrams, how many are lost.
    losses: u32,
    /// Hosts that hear and say nothing.
    cut: Vec<SocketAddr>,
    key: Key,
}

fn member(number: u16, life: u64) -> Member {
    let address = SocketAddr::from(([10, 0, 0, 1], 1000 + number));
    Member { host: format!("host-{number}").parse().unwrap(), address, life }
}

/// The first host admits others; each has a zone of its own.
fn about(of: &Member) -> About {
    About { admits: of.address.port() == 1000, zone: Some(of.host.as_str().parse().unwrap()) }
}

impl Cluster {
    /// Starts hosts that join through the first, and waits until all know all.
    fn new(hosts: u16, seed: u64) -> Self {
        let mut cluster = Self {
            now: Duration::ZERO,
            hosts: BTreeMap::new(),
            network: BinaryHeap::new(),
            sent: 0,
            bytes: 0,
            changes: Vec::new(),
            rng: SmallRng::seed_from_u64(seed),
            losses: 0,
            cut: Vec::new(),
            key: Key::from_hex(&"11".repeat(32)).unwrap(),
        };
        for number in 0..hosts {
            cluster.start(&member(number, 1));
        }
        let all = usize::from(hosts) - 1;
        cluster.run_until(60 * SECOND, |cluster| {
            cluster.hosts.values().all(|host| alive(host).len() == all)
        });
        cluster
    }

    fn now(&self) -> Now {
        Now { steady: self.now, wall: 20_000 * DAY + self.now }
    }

    fn start(&mut self, own: &Member) {
        let random = self.rng.random();
        let mut gossip = Gossip::new(own.clone(), about(own), self.key.clone(), random);
        gossip.meet([member(0, 0)].into_iter().filter(|other| other.host != own.host));
        let outputs = gossip.tick(self.now());
        self.hosts.insert(own.address, gossip);
        self.perform(own.address, outputs);
    }

    fn perform(&mut self, from: SocketAddr, outputs: Vec<Output>) {
        for output in outputs {
            match output {
                Output::Change(change) => self.changes.push((self.now, from, change)),
                Output::Send { to, datagram } => {
                    assert!(datagram.len() <= 1400, "{} bytes", datagram.len());
                    self.sent += 1;
                    self.bytes += datagram.len();
                    let lost = self.rng.random_range(0..1000) < self.losses;
                    if !lost && !self.cut.contains(&from) {
                        let delay = self.rng.random_range(1..20) * MILLI / 10;
                        self.network.push(Reverse((self.now + delay, self.sent, to, datagram)));
                    }
                }
            }
        }
    }

    /// Performs the next event; false if it is after `end`.
    fn step(&mut self, end: Duration) -> bool {
        let wakes = self.hosts.iter().filter_map(|(at, host)| Some((host.wakes_at()?, *at))).min();
        let arrives = self.network.peek().map(|Reverse((at, ..))| *at);
        let next = wakes.map(|(at, _)| at).into_iter().chain(arrives).min();
        let Some(next) = next.filter(|next| *next <= end) else {
            self.now = end;
            return false;
        };
        self.now = self.now.max(next);
        let now = self.now();
        if arrives == Some(next)
            && let Some(Reverse((_, _, to, datagram))) = self.network.pop()
        {
            if !self.cut.contains(&to)
                && let Some(host) = self.hosts.get_mut(&to)
            {
                let outputs = host.receive(&datagram, now).unwrap();
                self.perform(to, outputs);
            }
        } else if let Some((_, host)) = wakes {
            let outputs = self.hosts.get_mut(&host).unwrap().tick(now);
            self.perform(host, outputs);
        }
        true
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.step(end) {}
    }

    /// Runs until `condition`, and returns how long that took.
    fn run_until(&mut self, deadline: Duration, condition: impl Fn(&Self) -> bool) -> Duration {
        let begun = self.now;
        while !condition(self) {
            assert!(self.step(begun + deadline), "not within {deadline:?}");
        }
        self.now - begun
    }

    fn host(&mut self, number: u16) -> &mut Gossip {
        self.hosts.get_mut(&member(number, 0).address).unwrap()
    }
}

fn alive(host: &Gossip) -> Vec<Known> {
    host.others().into_iter().filter(Known::is_alive).collect()
}

#[test]
fn a_host_that_joins_is_known_with_its_spare_memory_within_5_s() {
    for seed in 0..20 {
        let mut cluster = Cluster::new(20, seed);
        cluster.run(10 * SECOND);
        cluster.start(&member(20, 1));
        let now = cluster.now();
        let spare = Bytes(5 * EXTENT_SIZE);
        let outputs = cluster.host(20).tell(spare, now);
        cluster.perform(member(20, 0).address, outputs);
        let knows = |host: &Gossip| {
            let new = alive(host).into_iter().find(|known| known.member == member(20, 1));
            new.and_then(|known| known.news).is_some_and(|news| news.spare().0 == 4 * EXTENT_SIZE)
        };
        cluster.run_until(5 * SECOND, |cluster| {
            let mut hosts = cluster.hosts.iter();
            hosts.all(|(at, host)| *at == member(20, 0).address || knows(host))
        });
        // The new host knows which of the others can admit hosts.
        cluster.run_until(35 * SECOND, |cluster| {
            let new = &cluster.hosts[&member(20, 0).address];
            let admits = |known: &Known| {
                let news = known.news.as_ref();
                news.is_some_and(|news| news.about.admits && news.about == about(&known.member))
            };
            alive(new)
                .iter()
                .find(|known| known.member.host == member(0, 0).host)
                .is_some_and(admits)
        });
    }
}

#[test]
fn hosts_that_die_at_once_are_known_to_be_down_within_5_s() {
    let mut longest = Duration::ZERO;
    for seed in 0..50 {
        let mut cluster = Cluster::new(20, seed);
        cluster.run(5 * SECOND);
        for number in [3, 7, 19] {
            cluster.hosts.remove(&member(number, 0).address).unwrap();
        }
        let took = cluster.run_until(5 * SECOND, |cluster| {
            cluster.hosts.values().all(|host| alive(host).len() == 16)
        });
        longest = longest.max(took);
        let gone = [3, 7, 19].map(|number| member(number, 1));
        let wrong = cluster
            .changes
            .iter()
            .filter(|(_, _, change)| matches!(change, Change::Down(down) if !gone.contains(down)));
        assert_eq!(wrong.count(), 0, "seed {seed}: a living host was taken for dead");
    }
    println!("known after {longest:?} at most");
}

#[test]
fn a_lossy_network_kills_nobody_for_long() {
    for seed in 0..5 {
        let mut cluster = Cluster::new(20, seed);
        cluster.losses = 100;
        cluster.run(120 * SECOND);
        cluster.losses = 0;
        cluster.run_until(15 * SECOND, |cluster| {
            cluster.hosts.values().all(|host| alive(host).len() == 19)
        });
    }
}

#[test]
fn a_host_whose_first_calls_are_lost_joins_later() {
    let mut cluster = Cluster::new(3, 1);
    cluster.cut = vec![member(3, 0).address];
    cluster.start(&member(3, 1));
    cluster.run(20 * SECOND);
    cluster.cut.clear();
    cluster
        .run_until(5 * SECOND, |cluster| cluster.hosts.values().all(|host| alive(host).len() == 3));
}

#[test]
fn a_cluster_that_was_cut_in_two_becomes_one_again() {
    let mut cluster = Cluster::new(6, 1);
    cluster.cut = vec![member(4, 0).address];
    cluster.run_until(10 * SECOND, |cluster| {
        let mut hosts = cluster.hosts.iter();
        hosts.all(|(at, host)| alive(host).len() == if cluster.cut.contains(at) { 0 } else { 4 })
    });
    cluster.run(60 * SECOND);
    cluster.cut.clear();
    cluster.run_until(30 * SECOND, |cluster| {
        cluster.hosts.values().all(|host| alive(host).len() == 5)
    });
}

#[test]
fn a_restarted_host_is_up_at_once_at_its_new_address() {
    let mut cluster = Cluster::new(5, 1);
    cluster.hosts.remove(&member(4, 0).address).unwrap();
    cluster.run(10 * SECOND);
    let moved = Member { address: SocketAddr::from(([10, 0, 0, 2], 1)), ..member(4, 2) };
    cluster.start(&moved);
    cluster.run_until(5 * SECOND, |cluster| {
        let knows = |host: &Gossip| alive(host).iter().any(|known| known.member == moved);
        cluster.hosts.iter().all(|(at, host)| *at == moved.address || knows(host))
    });
}

#[test]
fn all_hosts_notice_an_agent_that_starts_again_at_once() {
    let mut cluster = Cluster::new(5, 1);
    cluster.run(10 * SECOND);
    cluster.hosts.remove(&member(4, 0).address).unwrap();
    let again = member(4, 2);
    cluster.start(&again);
    let noticed = |cluster: &Cluster| {
        let anew = Change::Anew(again.clone());
        let told = cluster.changes.iter().filter(|(_, _, change)| *change == anew);
        told.map(|(_, at, _)| *at).collect::<std::collections::BTreeSet<_>>().len()
    };
    cluster.run_until(5 * SECOND, |cluster| noticed(cluster) == 4);
}

#[test]
fn a_host_that_leaves_is_known_to_be_gone() {
    for (for_good, seed) in (0..20).flat_map(|seed| [(true, seed), (false, seed)]) {
        let mut cluster = Cluster::new(10, seed);
        let (left, now) = (member(4, 0), cluster.now());
        let outputs = cluster.host(4).leave(for_good, now);
        cluster.perform(left.address, outputs);
        cluster.hosts.remove(&left.address).unwrap();
        cluster.run_until(3 * SECOND, |cluster| {
            cluster.hosts.values().all(|host| alive(host).len() == 8)
        });
        let forgotten = |host: &Gossip| host.others().iter().all(|k| k.member.host != left.host);
        if for_good {
            cluster.run_until(3 * SECOND, |cluster| cluster.hosts.values().all(forgotten));
            // The same name comes again, on another machine.
            let again = Member { address: SocketAddr::from(([10, 0, 0, 2], 1)), ..member(4, 2) };
            cluster.start(&again);
            cluster.run_until(5 * SECOND, |cluster| {
                cluster.hosts.values().all(|host| alive(host).len() == 9)
            });
        } else {
            cluster.run(10 * SECOND);
            assert!(!cluster.hosts.values().any(forgotten));
        }
    }
}

#[test]
fn a_second_host_of_a_name_is_noticed() {
    let mut cluster = Cluster::new(5, 1);
    let twin = Member { address: SocketAddr::from(([10, 0, 0, 2], 1)), ..member(4, 2) };
    cluster.start(&twin);
    let twins = [member(4, 1).address, twin.address];
    // The one of the two that others do not believe is told at last by the other's next news.
    cluster.run_until(40 * SECOND, |cluster| {
        let taken = |change: &Change| matches!(change, Change::NameTaken(_));
        cluster.changes.iter().any(|(_, at, change)| twins.contains(at) && taken(change))
    });
    let told = cluster.changes.iter().map(|(_, at, change)| (at, change));
    let wrong =
        told.filter(|(at, change)| !twins.contains(at) && matches!(change, Change::NameTaken(_)));
    assert_eq!(wrong.count(), 0);
}

#[test]
fn datagrams_of_strangers_change_nothing() {
    let mut cluster = Cluster::new(3, 1);
    let now = cluster.now();
    let mut stranger = Gossip::new(member(9, 1), About::default(), Key::random().unwrap(), 9);
    stranger.meet([member(1, 1)]);
    for output in stranger.tick(now) {
        let Output::Send { datagram, .. } = output else { continue };
        cluster.host(1).receive(&datagram, now).unwrap_err();
    }
    assert_eq!(alive(cluster.host(1)).len(), 2);
}

#[test]
fn an_idle_cluster_sends_little() {
    let mut cluster = Cluster::new(20, 1);
    cluster.run(60 * SECOND);
    (cluster.sent, cluster.bytes) = (0, 0);
    cluster.run(60 * SECOND);
    let a_second = |n: usize| n / 20 / 60;
    let datagrams = a_second(usize::try_from(cluster.sent).unwrap());
    println!("a host sends {datagrams} datagrams, {} bytes a second", a_second(cluster.bytes));
    assert!(a_second(cluster.bytes) < 4096);
}

#[test]
fn the_same_seeds_give_the_same_changes() {
    let run = |seed| {
        let mut cluster = Cluster::new(8, seed);
        cluster.losses = 50;
        cluster.run(30 * SECOND);
        (cluster.sent, cluster.changes)
    };
    assert!(run(1) == run(1));
    assert_ne!(run(1).0, run(2).0);
}

#[test]
fn a_digest_of_agreements_is_known_to_all_within_5_s() {
    for seed in 0..10 {
        let mut cluster = Cluster::new(20, seed);
        cluster.run(10 * SECOND);
        let now = cluster.now();
        let outputs = cluster.host(7).tell_agreements(42, now);
        cluster.perform(member(7, 0).address, outputs);
        cluster.run_until(5 * SECOND, |cluster| {
            let mut hosts = cluster.hosts.iter().filter(|(at, _)| **at != member(7, 0).address);
            hosts.all(|(_, host)| {
                let known = alive(host);
                let of = known.iter().find(|known| known.member.host == member(7, 0).host);
                of.and_then(|known| known.news.as_ref()?.agreements) == Some(42)
            })
        });
        let now = cluster.now();
        assert_eq!(cluster.host(7).tell_agreements(42, now), Vec::new());
    }
}
