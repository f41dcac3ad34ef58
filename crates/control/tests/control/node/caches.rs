//! Tests of local caches whose size the node chooses: they shrink under overload, and grow later.

mod spilled;
mod thin;

use aquifer_control::ledger::{AutoCache, OwnMemory, RegionMemory};
use aquifer_control::node::{Answer, Input, Output, Readings, Work};
use aquifer_control::{Action, Event, Message, Owner};
use aquifer_page::{Bytes, Group, LeaseId, RegionName, VolumeId};
use proptest::prelude::*;

use super::{Shell, memory};
use crate::host::{TOTAL, ack, req};

/// The size of each region.
const SIZE: Bytes = Bytes::gib(2);

/// A region with this cache in MiB, which is full.
fn region(name: &str, cache: u64) -> RegionMemory {
    let auto = AutoCache { volume: VolumeId(5), leased: SIZE, fetched: 0 };
    RegionMemory {
        name: name.parse().unwrap(),
        group: Group::default(),
        size: SIZE,
        vm_size: None,
        cache: Bytes::mib(cache),
        resident: Bytes::mib(cache),
        shared: Bytes::ZERO,
        auto: Some(auto),
        spilled: None,
    }
}

fn fetched(mut region: RegionMemory, pages: u64) -> RegionMemory {
    region.auto.iter_mut().for_each(|auto| auto.fetched = pages);
    region
}

fn leaseless(mut region: RegionMemory) -> RegionMemory {
    region.auto.iter_mut().for_each(|auto| auto.leased = Bytes::ZERO);
    region
}

impl Shell {
    /// Lets a period end a second later, with this use in percent.
    fn shows_caches(&mut self, used: u64, regions: &[RegionMemory]) -> &mut Self {
        let own = OwnMemory { regions: regions.to_vec(), ..OwnMemory::default() };
        self.after(1).read(Readings { memory: memory(used), own, ..Readings::default() })
    }

    /// Returns the cache that gets a new size, and the size in MiB.
    fn sets(&self) -> Option<(String, u64)> {
        let mut set = self.outputs.iter().filter_map(|output| match output {
            Output::SetCache { region, cache } => Some((region.to_string(), cache.0 >> 20)),
            _ => None,
        });
        let first = set.next();
        assert_eq!(set.next(), None, "one cache changes at a time");
        first
    }

    fn set_ends(&mut self, region: &str, failed: Option<&str>) -> &mut Self {
        let region: RegionName = region.parse().unwrap();
        self.input(Input::CacheSet { region, failed: failed.map(str::to_owned) })
    }

    fn told(&self, part: &str) -> bool {
        self.outputs.iter().any(|output| match output {
            Output::Decision { what, .. } => what.contains(part),
            _ => false,
        })
    }

    fn asks(&self) -> Vec<Message> {
        let sent = self.outputs.iter().filter_map(|output| match output {
            Output::Begin(_, Action::Send { message, .. }) => Some(message.clone()),
            _ => None,
        });
        sent.collect()
    }
}

#[test]
fn a_host_leaves_after_the_loan_for_a_cache_and_makes_no_other() {
    let local = [leaseless(region("items", 1024))];
    let mut shell = Shell::new();
    assert!(shell.shows_caches(90, &local).told("borrows 2GiB for region items"));
    assert_eq!(shell.leave().tie(), "this host is about to borrow or to return memory");
    // Nobody lends.
    shell.offers(&[]);
    assert_eq!(shell.leave().answer(), Answer::Left);
    for _ in 0..100 {
        shell.shows_caches(90, &local);
        assert!(!shell.told("borrows") && !shell.asks_offers());
    }
}

#[test]
fn the_largest_cache_shrinks_by_what_the_host_lacks() {
    let mut shell = Shell::new();
    let all = [region("small", 900), region("large", 2048)];
    assert_eq!(shell.shows_caches(60, &all).sets(), None);
    // Above 80 %: down to the middle of both thresholds, 70 % of 10 GiB.
    shell.shows_caches(81, &all);
    let lacks = (TOTAL.0 * 81 / 100 - TOTAL.0 * 7 / 10) >> 20;
    let (name, cache) = shell.sets().unwrap();
    assert_eq!((name.as_str(), cache), ("large", 2048 - lacks - 1));
    assert!(shell.told("small could free 388MiB"), "{:?}", shell.outputs);
    // One at a time, and no loan to swap to meanwhile.
    assert_eq!(shell.shows_caches(81, &all).sets(), None);
    shell.offers(&[("b", 8)]);
    assert_eq!(shell.asks(), []);
    shell.set_ends("large", None);
    assert_eq!(shell.shows_caches(70, &all).sets(), None);
}

#[test]
fn no_cache_shrinks_below_a_quarter_and_then_the_host_swaps() {
    let mut shell = Shell::new();
    let all = [region("items", 520)];
    assert_eq!(shell.shows_caches(99, &all).sets(), None, "8 MiB are not worth a step");
    shell.offers(&[("b", 8)]);
    let [Message::MemBorReq { owner, .. }] = &shell.asks()[..] else {
        panic!("{:?}", shell.outputs)
    };
    assert!(owner.is_swap());
    let shrunk = Shell::new().shows_caches(99, &[region("items", 1024)]).sets();
    assert_eq!(shrunk, Some(("items".to_owned(), 512)));
}

#[test]
fn the_first_page_leaves_after_the_host_has_borrowed() {
    let mut shell = Shell::new();
    let local = [leaseless(region("items", 2048))];
    shell.shows_caches(90, &local);
    assert!(shell.told("borrows 2GiB for region items, to shrink its cache"));
    assert_eq!((shell.sets(), shell.asks()), (None, vec![]));
    shell.offers(&[("b", 8)]);
    let asked = shell.asks().pop().unwrap();
    let Message::MemBorReq { request, bytes, owner, .. } = asked else { panic!("{asked:?}") };
    assert_eq!((bytes, owner), (SIZE, Owner::Region("items".parse().unwrap())));
    shell.hear("b", ack(request, 1, bytes));
    let begun = shell.outputs.iter().find_map(|output| match output {
        Output::Begin(work, Action::Activate(live)) => Some((work.clone(), live.clone())),
        _ => None,
    });
    let (work, live) = begun.unwrap();
    assert_eq!((work.clone(), live.volume), (Work::Volume(VolumeId(5)), VolumeId(5)));
    assert_eq!(shell.shows_caches(90, &local).sets(), None);
    let event = Some(Event::Activated { volume: live.volume });
    shell.input(Input::Done { work, event });
    // The reading is older than the lease.
    assert_eq!(shell.shows_caches(90, &local).sets(), None);
    assert_eq!(shell.shows_caches(90, &[region("items", 2048)]).sets().unwrap().0, "items");
}

/// Returns a host whose region "items" has a lease of host b.
fn with_a_lease() -> Shell {
    let mut shell = Shell::new();
    shell.shows_caches(90, &[leaseless(region("items", 2048))]).offers(&[("b", 8)]);
    let Some(Message::MemBorReq { request, bytes, .. }) = shell.asks().pop() else {
        panic!("{:?}", shell.outputs)
    };
    shell.hear("b", ack(request, 1, bytes));
    let event = Some(Event::Activated { volume: VolumeId(5) });
    shell.input(Input::Done { work: Work::Volume(VolumeId(5)), event });
    shell
}

impl Shell {
    /// Lets host b ask for the lease, and no host offer a place for it. Ends the move.
    fn vacates(&mut self, failed: Option<&str>) -> &mut Self {
        let (volume, lease) = (VolumeId(5), LeaseId(1));
        self.hear("b", Message::MemLenFin { lease, generation: 0 });
        self.offers(&[]);
        assert_eq!(self.told("must vacate lease"), failed == Some("no room"));
        assert!(self.begun().contains(&Action::Evacuate {
            volume,
            lease,
            onto: Vec::new(),
            spills: false
        }));
        let unused = Vec::new();
        let event = match failed {
            Some(why) => Event::EvacuationFailed { lease, unused, why: why.to_owned() },
            None => Event::Evacuated { lease, unused },
        };
        self.done(Work::Lease(lease), event);
        self
    }
}

#[test]
fn pages_come_home_if_their_lender_waits_and_no_other_has_room() {
    let mut shell = with_a_lease();
    let half = [region("items", 1024)];
    assert_eq!(shell.shows_caches(60, &half).sets(), None);
    shell.vacates(Some("no room"));
    assert!(shell.told("cannot vacate lease"));
    // The missing GiB would lift its use above 70 %.
    assert_eq!(shell.shows_caches(61, &half).sets(), None);
    assert_eq!(shell.shows_caches(60, &half).sets(), Some(("items".to_owned(), 2048)));
    assert!(shell.told("so that its pages come home"));
    shell.set_ends("items", None);
    shell.vacates(None);
    assert!(shell.told("vacated lease"));
    let whole = [leaseless(region("items", 2048))];
    assert_eq!(shell.shows_caches(70, &whole).sets(), None);
    shell.shows_caches(90, &whole);
    assert!(shell.told("borrows 2GiB for region items"), "it may borrow again");
}

#[test]
fn a_failure_to_vacate_is_told_once() {
    let mut shell = with_a_lease();
    let tight = [region("items", 1024)];
    shell.vacates(Some("no room"));
    for _ in 0..3 {
        shell
            .shows_caches(75, &tight)
            .hear("b", Message::MemLenFin { lease: LeaseId(1), generation: 0 });
        shell.offers(&[]);
        assert!(!shell.told("must vacate") && !shell.told("moves the pages"));
        let (lease, unused, why) = (LeaseId(1), Vec::new(), "no room".to_owned());
        shell.done(Work::Lease(lease), Event::EvacuationFailed { lease, unused, why });
        assert!(!shell.told("cannot vacate"));
    }
}

#[test]
fn a_cache_that_cannot_shrink_rests_while_the_host_swaps() {
    let mut shell = Shell::new();
    let local = [leaseless(region("items", 2048))];
    shell.shows_caches(90, &local).offers(&[]);
    assert!(shell.told("cannot change the cache of region items"), "{:?}", shell.outputs);
    shell.shows_caches(90, &local).offers(&[("b", 1)]);
    assert!(matches!(&shell.asks()[..], [Message::MemBorReq { owner, .. }] if owner.is_swap()));
    for _ in 0..50 {
        assert!(!shell.shows_caches(90, &local).told("borrows 2GiB for region"));
    }
    let mut other = Shell::new();
    other.shows_caches(90, &[region("items", 2048)]).set_ends("items", Some("the lender is away"));
    assert!(other.told("the lender is away"));
    assert_eq!(other.shows_caches(90, &[region("items", 2048)]).sets(), None);
    assert_eq!(
        other.after(60).shows_caches(90, &[region("items", 2048)]).sets().unwrap().0,
        "items"
    );
}

#[test]
fn the_cache_that_fetches_grows_into_free_room() {
    let mut shell = Shell::new();
    let at = |pages| [fetched(region("busy", 1024), pages), region("idle", 1024)];
    shell.shows_caches(30, &at(0));
    assert_eq!(shell.after(30).shows_caches(30, &at(0)).sets(), None, "it fetches nothing");
    assert_eq!(shell.shows_caches(30, &at(5000)).sets(), None, "it compares over 30 s");
    assert_eq!(shell.after(30).shows_caches(30, &at(9000)).sets(), Some(("busy".to_owned(), 1280)));
    assert!(shell.told("it fetched 9000 pages in 30 s"), "{:?}", shell.outputs);
    assert_eq!(shell.node.ledger().cache_floor, Bytes::mib(1280 + 1024), "it is promised at once");
    // Above T_lower there is no room to grow.
    let mut full = Shell::new();
    full.shows_caches(59, &at(0));
    assert_eq!(full.after(30).shows_caches(59, &at(9000)).sets(), None);
}

/// Returns caches of 2 GiB that hold 512 MiB each.
fn calm(names: &[&str]) -> Vec<RegionMemory> {
    let calm = |name: &&str| RegionMemory { resident: Bytes::mib(512), ..region(name, 2048) };
    names.iter().map(calm).collect()
}

#[test]
fn an_overcommitted_host_lends_what_caches_do_not_use() {
    let lends = |shell: &mut Shell, request| {
        shell.hear("b", req(request, Bytes::gib(1)));
        matches!(shell.begun()[..], [Action::OpenLease(_)])
    };
    // Programs use 2 GiB, and the caches of 8 GiB are promised in full.
    let mut shell = Shell::new();
    shell.shows_caches(40, &calm(&["a", "b", "c", "d"]));
    assert_eq!(shell.node.ledger().overcommitted, Bytes::ZERO);
    assert!(!lends(&mut shell, 1));
    // Programs take more than that leaves, but the promises are not too large.
    shell.shows_caches(60, &calm(&["a", "b", "c", "d"]));
    assert!(shell.node.ledger().overcommitted > Bytes::ZERO);
    assert!(!lends(&mut shell, 2));
    let all = ["a", "b", "c", "d", "e", "f"];
    shell.shows_caches(45, &calm(&all));
    assert_eq!(shell.node.ledger().promised_too_much(), Bytes::gib(2));
    assert!(lends(&mut shell, 3));
    shell.shows_caches(45, &calm(&all[..4]));
    assert!(!lends(&mut shell, 4), "the promises fit again");
    let full = all.map(|name| RegionMemory { resident: Bytes::mib(1240), ..region(name, 2048) });
    let mut shell = Shell::new();
    shell.shows_caches(75, &full);
    assert!(!lends(&mut shell, 5), "the lease would lift its use above T_upper");
}

#[test]
fn caches_shrink_if_a_recall_takes_long() {
    let mut shell = Shell::new();
    shell.lend("b", 1);
    let all = [region("items", 2048)];
    shell.shows_caches(90, &all);
    assert!(shell.sent().iter().any(|(_, sent)| matches!(sent, Message::MemLenFin { .. })));
    assert_eq!(shell.sets(), None, "it recalls first");
    assert_eq!(shell.after(2).shows_caches(90, &all).sets(), None);
    shell.after(3).shows_caches(90, &all);
    assert_eq!(shell.sets().map(|(name, _)| name).as_deref(), Some("items"));
}

#[test]
fn a_recall_without_end_does_not_end_lending() {
    let mut shell = Shell::new();
    shell.lend("b", 1);
    shell.shows_caches(90, &[]);
    assert!(shell.sent().iter().any(|(_, sent)| matches!(sent, Message::MemLenFin { .. })));
    let lends = |shell: &mut Shell, request| {
        shell.hear("c", req(request, Bytes::gib(1)));
        matches!(shell.begun()[..], [Action::OpenLease(_)])
    };
    shell.after(30).shows_caches(20, &[]);
    assert!(!lends(&mut shell, 2), "the memory may come back soon");
    shell.after(30).shows_caches(20, &[]);
    assert!(lends(&mut shell, 3));
}

#[test]
fn a_cache_of_an_overcommitted_host_grows_as_use_allows() {
    let mut shell = Shell::new();
    let at = |pages| {
        [vec![fetched(region("busy", 1024), pages)], calm(&["a", "b", "c", "d", "e"])].concat()
    };
    shell.shows_caches(40, &at(0));
    assert!(shell.node.ledger().overcommitted > Bytes::ZERO);
    shell.after(30).shows_caches(40, &at(0));
    assert_eq!(shell.after(30).shows_caches(40, &at(9000)).sets(), Some(("busy".to_owned(), 1280)));
}

proptest! {
    /// Whatever the use of memory does, no cache grows soon after one has shrunk, and none shrinks
    /// below its least.
    #[test]
    fn caches_do_not_swing(used in proptest::collection::vec(20_u64..100, 1..200)) {
        let mut shell = Shell::new();
        let (mut cache, mut pages, mut shrunk) = (2048_u64, 0, None);
        for (second, used) in used.into_iter().enumerate() {
            pages += 300;
            shell.shows_caches(used, &[fetched(region("items", cache), pages)]);
            if let Some((_, next)) = shell.sets() {
                prop_assert!((512..=2048).contains(&next), "{next}");
                if next > cache {
                    prop_assert!(shrunk.is_none_or(|at| second - at >= 30), "{shrunk:?} {second}");
                    prop_assert!(used <= 60);
                } else {
                    prop_assert!(used > 80);
                    shrunk = Some(second);
                }
                cache = next;
                shell.set_ends("items", None);
            }
        }
    }
}
