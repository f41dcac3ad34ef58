//! Leases smaller than their region: what a host borrows, and what it gives back.

use aquifer_control::ledger::CacheLimit;

use super::*;

const VOLUME: VolumeId = VolumeId(5);

/// A region of 8 GiB with this cache and this much at lenders, both in MiB.
fn large(cache: u64, leased: u64) -> RegionMemory {
    let auto = AutoCache { volume: VOLUME, leased: Bytes::mib(leased), fetched: 0 };
    RegionMemory { size: Bytes::gib(8), auto: Some(auto), ..region("items", cache) }
}

impl Shell {
    /// Lets b, which has this much to spare in GiB, lend what this host asks for. Returns that in
    /// MiB.
    fn borrows(&mut self, lease: u128, spare: u64) -> u64 {
        self.offers(&[("b", spare)]);
        let asked = self.asks().pop().unwrap();
        let Message::MemBorReq { request, bytes, .. } = asked else { panic!("{asked:?}") };
        self.hear("b", ack(request, lease, bytes));
        bytes.0 >> 20
    }

    fn resizes(&mut self, used: u64, cache: u64, leased: u64) -> Option<u64> {
        let set = self.shows_caches(used, &[large(cache, leased)]).sets();
        let (_, cache) = set?;
        self.set_ends("items", None);
        Some(cache)
    }
}

/// Returns a host whose region has a lease of 2 GiB and a cache of 7 GiB, the least that it may
/// have with it.
fn with_one() -> Shell {
    let mut shell = Shell::new();
    // Down from 81 % to 70 % of 10 GiB: 1,126.4 MiB. Four times as much, in whole extents.
    assert_eq!(shell.resizes(81, 8192, 0), None);
    assert!(shell.told("borrows 4.4GiB for region items"), "{:?}", shell.outputs);
    assert_eq!(shell.borrows(1, 2), 2048, "b has no more, and half of that would be of use");
    shell.done(Work::Volume(VOLUME), Event::Activated { volume: VOLUME });
    assert_eq!(shell.resizes(81, 8192, 2048), Some(7168), "the lease allows no more");
    shell
}

#[test]
fn a_host_borrows_what_leaves_several_times_and_then_more() {
    let mut shell = with_one();
    assert_eq!(shell.resizes(75, 7168, 2048), None);
    assert_eq!(shell.resizes(81, 7168, 2048), None);
    assert!(shell.told("borrows 6GiB for region items"), "{:?}", shell.outputs);
    assert_eq!(shell.borrows(2, 8), 1024, "borrow.max is 3 GiB");
    let [Action::Extend(live)] = &shell.begun()[..] else { panic!("{:?}", shell.outputs) };
    assert_eq!(live.volume, VOLUME);
    assert_eq!(live.leases.iter().map(|lease| lease.lease).collect::<Vec<_>>(), [LeaseId(2)]);
    // One loan at a time, and no shrinking beyond the leases that the region has.
    assert_eq!(shell.resizes(81, 7168, 2048), None);
    assert!(!shell.told("borrows"));
    shell.done(Work::Volume(VOLUME), Event::Extended { volume: VOLUME, unused: vec![] });
    // This reading is older than the lease.
    assert_eq!(shell.resizes(81, 7168, 2048), None);
    assert_eq!(shell.resizes(81, 7168, 3072), Some(6656));
}

#[test]
fn a_smaller_loan_than_wanted_is_of_use() {
    let mut shell = Shell::new();
    assert_eq!(shell.resizes(81, 8192, 0), None);
    assert_eq!(shell.borrows(1, 1), 1024);
    shell.done(Work::Volume(VOLUME), Event::Activated { volume: VOLUME });
    assert_eq!(shell.resizes(81, 8192, 1024), Some(8192 - 512));
}

#[test]
fn leases_that_a_region_cannot_take_go_back() {
    let mut shell = with_one();
    shell.resizes(81, 7168, 2048);
    shell.borrows(2, 8);
    let unused = vec![LeaseId(2)];
    shell.done(Work::Volume(VOLUME), Event::Extended { volume: VOLUME, unused });
    let fin = Message::MemBorFin { lease: LeaseId(2), generation: 0 };
    assert!(shell.asks().contains(&fin), "{:?}", shell.outputs);
    assert!(shell.told("cannot change the cache of region items"), "{:?}", shell.outputs);
    assert_eq!(shell.resizes(81, 7168, 2048), None);
    assert!(!shell.told("borrows"), "the region rests for a minute");
    shell.after(60).resizes(81, 7168, 2048);
    assert!(shell.told("borrows"));
}

#[test]
fn a_limit_of_several_caches_needs_room_for_a_whole_region() {
    let mut shell = Shell::new();
    let limit = CacheLimit { group: None, bytes: Bytes::gib(1) };
    let (regions, cache_limits) = (vec![large(8192, 0)], vec![limit]);
    let own = OwnMemory { regions, cache_limits, ..OwnMemory::default() };
    shell.after(1).read(Readings { memory: memory(81), own, ..Readings::default() });
    shell.offers(&[("b", 9)]);
    assert!(shell.told("has no 8GiB for region items"), "{:?}", shell.outputs);
}

/// Returns the leases that the host gives back at this reading.
fn returned(shell: &mut Shell, cache: u64, leased: u64) -> Vec<LeaseId> {
    shell.shows_caches(50, &[large(cache, leased)]);
    let returned = shell.begun().into_iter().filter_map(|action| match action {
        Action::Evacuate { lease, onto, .. } => {
            assert_eq!(onto, [], "nothing replaces it");
            Some(lease)
        }
        _ => None,
    });
    returned.collect()
}

#[test]
fn a_lease_that_is_not_needed_goes_back() {
    let mut shell = with_one();
    assert_eq!(returned(shell.after(300), 7168, 2048), []);
    // The cache has grown: 1,280 MiB would suffice, and 512 MiB more. That is most of the lease.
    assert_eq!(returned(shell.after(300), 7872, 2048), []);
    let whole = returned(shell.after(300), 8192, 2048);
    assert_eq!(whole, [LeaseId(1)]);
    assert!(shell.told("gives lease"), "{:?}", shell.outputs);
    let (lease, unused) = (LeaseId(1), vec![]);
    shell.done(Work::Lease(lease), Event::Evacuated { lease, unused });
    assert!(shell.asks().contains(&Message::MemBorFin { lease, generation: 0 }));
    assert_eq!(returned(shell.after(300), 8192, 0), []);
}

#[test]
fn a_lease_that_cannot_go_back_stays_a_while() {
    let mut shell = with_one();
    let whole = returned(shell.after(300), 8192, 2048);
    assert_eq!(whole, [LeaseId(1)]);
    let (lease, unused, why) = (LeaseId(1), vec![], "b does not answer".to_owned());
    shell.done(Work::Lease(lease), Event::EvacuationFailed { lease, unused, why });
    assert_eq!(returned(shell.after(30), 8192, 2048), []);
    assert_eq!(returned(shell.after(300), 8192, 2048), [LeaseId(1)]);
}

#[test]
fn a_lender_may_ask_for_a_lease_that_could_not_go_back() {
    let mut shell = with_one();
    assert_eq!(returned(shell.after(300), 8192, 2048), [LeaseId(1)]);
    let lease = LeaseId(1);
    let (unused, why) = (vec![], "it moves".to_owned());
    shell.done(Work::Lease(lease), Event::EvacuationFailed { lease, unused, why });
    // No lender waits for it, so the cache does not grow for one.
    assert_eq!(shell.resizes(50, 7168, 2048), None);
    shell.hear("b", Message::MemLenFin { lease, generation: 0 });
    shell.offers(&[("c", 8)]);
    let asked = shell.asks().pop().unwrap();
    assert!(
        matches!(asked, Message::MemBorReq { bytes, .. } if bytes == Bytes::gib(2)),
        "another lease replaces it: {asked:?}"
    );
}

#[test]
fn a_new_lease_does_not_go_back_at_once() {
    let mut shell = Shell::new();
    assert_eq!(shell.resizes(81, 8192, 0), None);
    shell.borrows(1, 2);
    shell.done(Work::Volume(VOLUME), Event::Activated { volume: VOLUME });
    // The overload is over.
    assert_eq!(returned(&mut shell, 8192, 2048), []);
    assert_eq!(returned(shell.after(100), 8192, 2048), []);
    assert_eq!(returned(shell.after(30), 8192, 2048), [LeaseId(1)]);
}

#[test]
fn memory_that_was_never_touched_needs_a_place_too() {
    let partly = |leased| {
        let region = large(8192, leased);
        RegionMemory { resident: Bytes::gib(3), ..region }
    };
    let mut shell = Shell::new();
    shell.shows_caches(81, &[partly(0)]);
    // At least 5 GiB outside the cache, and as much again. This host may borrow 3 GiB.
    shell.offers(&[("b", 8)]);
    assert!(shell.told("has no 8GiB for region items"), "{:?}", shell.outputs);
}

#[test]
fn a_cache_grows_by_the_lease_that_must_go() {
    let mut shell = with_one();
    shell.resizes(81, 7168, 2048);
    shell.borrows(2, 8);
    shell.done(Work::Volume(VOLUME), Event::Extended { volume: VOLUME, unused: vec![] });
    shell.resizes(81, 7168, 3072);
    shell.resizes(60, 6656, 3072);
    let lease = LeaseId(1);
    shell.hear("b", Message::MemLenFin { lease, generation: 0 });
    shell.offers(&[]);
    let (unused, why) = (vec![], "no room".to_owned());
    shell.done(Work::Lease(lease), Event::EvacuationFailed { lease, unused, why });
    // 7,680 MiB suffice with the other lease. The host has 1,229 MiB for that below 70 %.
    shell.after(10);
    let grown = shell.shows_caches(58, &[large(6656, 3072)]).sets();
    assert_eq!(grown, Some(("items".to_owned(), 7680)));
    assert!(shell.told("so that its pages come home"));
    shell.set_ends("items", None);
    // From then on, the engine brings them home at the lender's next request.
    assert_eq!(shell.after(10).resizes(58, 7680, 3072), None);
}

proptest! {
    /// The engine counts whole extents, and keeps 4 MiB of the cache for pages on their way.
    #[test]
    fn a_cache_never_shrinks_below_what_the_engine_allows(
        (size, leased) in (1..400u64, 0..30u64),
        used in 81..100u64,
    ) {
        let (size, leased) = (Bytes::mib(size * 24), Bytes::mib(leased * 64));
        let auto = AutoCache { volume: VOLUME, leased, fetched: 0 };
        let whole = RegionMemory { size, auto: Some(auto), ..region("items", size.0 >> 20) };
        let mut shell = Shell::new();
        if let Some((_, cache)) = shell.shows_caches(used, &[whole]).sets() {
            let shortage = size.round_up_to_extents().saturating_sub(leased);
            let least = if shortage > Bytes::ZERO { shortage + Bytes::mib(4) } else { shortage };
            prop_assert!(Bytes::mib(cache + 1) >= least.min(size), "{cache} of {size}, {leased}");
        }
    }
}
