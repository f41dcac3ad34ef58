//! Tests of keys that get old: which lease is replaced, when, and what comes first.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use aquifer_control::node::{
    Answer, CopyReading, Health, Input, KeySettings, LeaseReading, MoveEnd, Output, Readings,
    VmReading, VolumeReading, Work,
};
use aquifer_control::{
    Action, BorrowedLease, Cause, Config, Event, LiveVolume, Message, Owner, Protection,
    Protections, Reason, RegionRequest, Restored, Subject,
};
use aquifer_page::{Bytes, Group, LeaseId, VolumeId};

use super::{LEASE, Shell, memory};
use crate::host::{ack, len_fin, name, rej};

const DAY: Duration = Duration::from_secs(86_400);
const LIFETIME: Duration = Duration::from_secs(30 * 86_400);
const VOLUME: VolumeId = VolumeId(5);
const OTHER: LeaseId = LeaseId(2);
const NEW: LeaseId = LeaseId(3);

/// A node whose region `items` holds [`LEASE`] of `b`, and whose region `more` holds [`OTHER`].
/// Their keys have these ages.
fn with_ages(ages: &[(LeaseId, Duration)], config: Config) -> Shell {
    let keys = KeySettings {
        lifetime: Some(LIFETIME),
        ages: ages.iter().copied().collect(),
        ..KeySettings::default()
    };
    with_keys(keys, config)
}

fn with_keys(keys: KeySettings, config: Config) -> Shell {
    let lease = |lease| BorrowedLease {
        lease,
        lender: name("b"),
        bytes: Bytes::gib(1),
        uris: vec!["here".to_owned()],
        generation: 0,
    };
    let region = |volume, region: &str, leases| LiveVolume {
        volume,
        bytes: Bytes::gib(1),
        owner: Owner::Region(region.parse().unwrap()),
        group: Group::default(),
        cause: Cause::ByHand,
        leases,
        copies: Vec::new(),
    };
    let volumes = vec![
        region(VOLUME, "items", vec![lease(LEASE)]),
        region(VolumeId(6), "more", vec![lease(OTHER)]),
    ];
    let found = Restored { volumes, ..Restored::default() };
    let mut shell = Shell::that_rotates(found, config, Some(Duration::from_secs(300)), keys);
    shell.input(Input::Peers(["b", "c", "d"].map(name).into()));
    shell
}

/// A node with one old key, that of [`LEASE`].
fn with_an_old_key() -> Shell {
    with_ages(&[(LEASE, LIFETIME)], wide())
}

fn wide() -> Config {
    Config { max_borrowed: Bytes::gib(8), ..crate::host::config() }
}

fn healthy(lease: LeaseId, copy: Option<LeaseId>) -> LeaseReading {
    let copy = copy.map(|lease| CopyReading {
        lease,
        first_answers: true,
        answers: true,
        lacks: Bytes::ZERO,
        first_lacks: Bytes::ZERO,
    });
    let (lender, placed) = (name("b"), Bytes::mib(64));
    LeaseReading { lease, lender, placed, health: Health::Ok, copy }
}

fn volume(volume: VolumeId, leases: Vec<LeaseReading>) -> VolumeReading {
    VolumeReading { volume, takes_copies: true, spilled: Bytes::ZERO, last_error: None, leases }
}

impl Shell {
    /// Takes a look at volumes, and lets a period end at this use. Held leases have own keys.
    fn look(&mut self, used: u64, volumes: Vec<VolumeReading>) -> &mut Self {
        self.input(Input::Volumes(volumes));
        let held = self.node.controller().borrowed().into_iter();
        let firsts = held.filter(|held| held.copy_of.is_none());
        let own_keys = firsts.map(|held| held.lease.lease).collect();
        self.after(1).read(Readings { memory: memory(used), own_keys, ..Readings::default() })
    }

    /// Lets a period end in which all is well.
    fn calm(&mut self) -> &mut Self {
        let held = self.node.controller().borrowed();
        let of = |id| {
            let leases = held.iter().filter(|held| held.volume == id);
            volume(id, leases.map(|held| healthy(held.lease.lease, None)).collect())
        };
        let volumes = vec![of(VOLUME), of(VolumeId(6))];
        self.look(20, volumes)
    }

    fn decisions(&self) -> Vec<(String, Vec<Subject>)> {
        let decisions = self.outputs.iter().filter_map(|output| match output {
            Output::Decision { what, about, .. } => Some((what.clone(), about.clone())),
            _ => None,
        });
        decisions.collect()
    }

    fn decides(&self, text: &str) -> bool {
        self.decisions().iter().any(|(what, _)| what.contains(text))
    }

    fn is_leaving(&self, lease: LeaseId) -> bool {
        let held = self.node.controller().borrowed();
        held.iter().any(|held| held.lease.lease == lease && held.leaving)
    }

    fn rotate(&mut self, lease: Option<LeaseId>) -> Answer {
        let ticket = self.ticket();
        self.input(Input::RotateKeys { lease, ticket });
        self.answer()
    }

    /// Grants the request just sent as `lease`.
    fn grant(&mut self, lease: LeaseId) -> &mut Self {
        let (to, request) = self.sent().pop().expect("a request");
        let Message::MemBorReq { request, bytes, .. } = request else { panic!("{request:?}") };
        self.hear(&to, ack(request, lease.0, bytes))
    }

    /// Returns the leases that take the pages of a lease that is left now.
    fn evacuates(&self, lease: LeaseId) -> Option<Vec<LeaseId>> {
        self.begun().into_iter().find_map(|action| match action {
            Action::Evacuate { lease: left, onto, spills, .. } if left == lease => {
                assert!(!spills, "no key is worth a disk");
                Some(onto.into_iter().map(|lease| lease.lease).collect())
            }
            _ => None,
        })
    }
}

#[test]
fn an_old_key_is_replaced_with_its_lease() {
    let mut shell = with_an_old_key();
    assert!(shell.calm().asks_offers());
    shell.offers(&[("b", 2), ("c", 4)]);
    let lease = Subject::Lease(LEASE);
    let region = Subject::Region("items".parse().unwrap());
    let tells = |(what, about): &(String, Vec<Subject>)| {
        what.contains("it is 30d 0h old, of at most 30d 0h")
            && about.contains(&lease)
            && about.contains(&region)
    };
    assert!(shell.decisions().iter().any(tells), "{:?}", shell.decisions());
    shell.grant(NEW);
    assert_eq!(shell.evacuates(LEASE), Some(vec![NEW]));
    assert!(shell.node.rotates(LEASE) && !shell.node.rotates(OTHER));
    shell.done(Work::Lease(LEASE), Event::Evacuated { lease: LEASE, unused: Vec::new() });
    let fin = |(to, sent): &(String, Message)| {
        to == "b" && matches!(sent, Message::MemBorFin { lease: LEASE, .. })
    };
    assert!(shell.sent().iter().any(fin), "{:?}", shell.sent());
    for _ in 0..600 {
        assert!(!shell.calm().asks_offers(), "the new key is young");
    }
    let ages = shell.node.key_ages();
    assert_eq!(ages.keys().copied().collect::<Vec<_>>(), [OTHER, NEW]);
    assert!(ages[&NEW] <= Duration::from_secs(601), "{ages:?}");
}

#[test]
fn a_key_is_left_alone_before_the_last_quarter_of_its_life() {
    let mut shell = with_ages(&[], wide());
    let quarter = LIFETIME / 4;
    while shell.now < LIFETIME - quarter {
        assert!(!shell.calm().asks_offers(), "at {:?}", shell.now);
        shell.after(DAY.as_secs() / 4);
    }
    let begins = |shell: &mut Shell| (0..5).any(|_| shell.calm().asks_offers());
    while !begins(&mut shell) {
        shell.after(3600);
        assert!(shell.now < LIFETIME + DAY, "it gets too old");
    }
}

#[test]
fn without_a_lifetime_only_the_operator_replaces_keys() {
    let keys =
        KeySettings { ages: BTreeMap::from([(LEASE, LIFETIME * 9)]), ..KeySettings::default() };
    let mut shell = Shell::that_rotates(Restored::default(), wide(), None, keys);
    shell.period(20).borrow_for().offers(&[("b", 1)]);
    let made = shell.granted();
    shell.done(Work::Volume(made), Event::Activated { volume: made });
    for _ in 0..100 {
        assert!(!shell.calm().asks_offers());
    }
    assert_eq!(shell.rotate(None), Answer::Rotates(vec![LEASE]));
    assert!(shell.calm().asks_offers());
    shell.offers(&[("c", 4)]).grant(NEW);
    assert_eq!(shell.evacuates(LEASE), Some(vec![NEW]));
}

#[test]
fn without_room_a_lease_stays_and_the_pause_grows() {
    let mut shell = with_an_old_key();
    let mut tries = Vec::new();
    for _ in 0..7200 {
        if shell.calm().asks_offers() {
            shell.offers(&[("c", 0)]);
            assert!(shell.decides("keeps the key of lease"), "{:?}", shell.decisions());
            assert!(shell.sent().is_empty() && !shell.is_leaving(LEASE));
            tries.push(shell.now.as_secs());
        }
    }
    let waits: Vec<_> = tries.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(waits, [600, 1200, 2400], "{tries:?}");
}

#[test]
fn a_lease_that_lenders_do_not_replace_stays() {
    let mut shell = with_an_old_key();
    assert!(shell.calm().asks_offers());
    shell.offers(&[("c", 1)]);
    let (to, request) = shell.sent().pop().expect("a request");
    let Message::MemBorReq { request, .. } = request else { panic!("{request:?}") };
    shell.hear(&to, rej(request, Bytes::ZERO, Reason::NoRoom));
    assert!(shell.decides("keeps lease"), "{:?}", shell.decisions());
    assert!(shell.begun().is_empty() && !shell.is_leaving(LEASE) && !shell.node.rotates(LEASE));
    // A recall of this lease is like any other.
    shell.hear("b", len_fin(LEASE.0)).offers(&[]);
    assert_eq!(shell.evacuates(LEASE), Some(Vec::new()));
}

#[test]
fn part_of_a_replacement_goes_back() {
    let mut shell = with_an_old_key();
    assert!(shell.calm().asks_offers());
    shell.offers(&[("c", 1)]);
    let (to, request) = shell.sent().pop().expect("a request");
    let Message::MemBorReq { request, .. } = request else { panic!("{request:?}") };
    shell.hear(&to, ack(request, NEW.0, Bytes::mib(64)));
    assert_eq!(shell.evacuates(LEASE), None);
    assert!(shell.decides("lenders granted 64MiB"), "{:?}", shell.decisions());
    let fin = |(_, sent): &(String, Message)| matches!(sent, Message::MemBorFin { lease: NEW, .. });
    assert!(shell.sent().iter().any(fin) && !shell.is_leaving(LEASE));
}

#[test]
fn a_move_that_fails_leaves_the_lease_in_use() {
    let mut shell = with_an_old_key();
    assert!(shell.calm().asks_offers());
    shell.offers(&[("c", 1)]).grant(NEW);
    let why = "held still".to_owned();
    let failed = Event::EvacuationFailed { lease: LEASE, unused: Vec::new(), why };
    shell.done(Work::Lease(LEASE), failed);
    assert!(!shell.is_leaving(LEASE));
    // What has come stays, so the next attempt borrows nothing.
    let begins = |shell: &mut Shell| shell.calm().asks_offers();
    assert!((0..1300).any(|_| begins(&mut shell)));
    shell.offers(&[]);
    assert_eq!(shell.evacuates(LEASE), Some(Vec::new()), "{:?}", shell.decisions());
}

#[test]
fn what_the_operator_ordered_outlives_the_agent() {
    let keys = KeySettings { ordered: BTreeSet::from([LEASE]), ..KeySettings::default() };
    let mut shell = with_keys(keys, wide());
    assert!(shell.calm().asks_offers());
    shell.offers(&[("c", 4)]).grant(NEW);
    assert_eq!(shell.evacuates(LEASE), Some(vec![NEW]));
    assert_eq!(*shell.node.ordered_keys(), BTreeSet::from([LEASE]));
    shell.done(Work::Lease(LEASE), Event::Evacuated { lease: LEASE, unused: Vec::new() });
    shell.calm();
    assert!(shell.node.ordered_keys().is_empty());
}

#[test]
fn one_lease_at_a_time_is_replaced() {
    let mut shell = with_ages(&[(LEASE, LIFETIME), (OTHER, LIFETIME * 2)], wide());
    assert!(shell.calm().asks_offers());
    shell.offers(&[("c", 4)]).grant(NEW);
    assert_eq!(shell.evacuates(OTHER), Some(vec![NEW]), "the oldest first");
    for _ in 0..3600 {
        // It asks for offers while it moves, but replaces nothing else.
        if shell.calm().asks_offers() {
            shell.offers(&[("c", 4)]);
        }
        assert!(!shell.is_leaving(LEASE));
    }
    shell.done(Work::Lease(OTHER), Event::Evacuated { lease: OTHER, unused: Vec::new() });
    let ended = shell.now;
    while !shell.calm().asks_offers() {}
    assert!(shell.now - ended >= Duration::from_secs(60), "{:?} {ended:?}", shell.now);
    shell.offers(&[("c", 4)]);
    assert!(shell.is_leaving(LEASE));
}

#[test]
fn nothing_is_replaced_while_something_else_goes_on() {
    let sick = |health| {
        let lease = LeaseReading { health, ..healthy(LEASE, None) };
        vec![volume(VOLUME, vec![lease]), volume(VolumeId(6), vec![healthy(OTHER, None)])]
    };
    let spilled = || {
        let spilled = VolumeReading { spilled: Bytes::mib(64), ..sick(Health::Ok).remove(0) };
        vec![spilled]
    };
    let is_quiet = |shell: &mut Shell, used, look: &dyn Fn() -> Vec<VolumeReading>, what: &str| {
        for _ in 0..100 {
            if shell.look(used, look()).asks_offers() {
                shell.offers(&[("c", 4)]);
            }
            assert!(!shell.decides("replaces lease"), "{what}: {:?}", shell.decisions());
            assert!(!shell.node.rotates(LEASE), "{what}");
        }
    };
    is_quiet(&mut with_an_old_key(), 20, &Vec::new, "unknown health");
    is_quiet(&mut with_an_old_key(), 20, &|| sick(Health::Unreachable), "a silent lender");
    is_quiet(&mut with_an_old_key(), 20, &|| sick(Health::Lost), "lost pages");
    is_quiet(&mut with_an_old_key(), 20, &spilled, "spilled pages");
    is_quiet(&mut with_an_old_key(), 90, &|| sick(Health::Ok), "a shortage");
    let mut drained = with_an_old_key();
    drained.input(Input::Drain { on: true, stored: Bytes::ZERO, vms: true });
    is_quiet(&mut drained, 20, &|| sick(Health::Ok), "a drain");
    let mut recalled = with_an_old_key();
    recalled.hear("b", len_fin(OTHER.0)).offers(&[]);
    assert_eq!(recalled.evacuates(OTHER), Some(Vec::new()));
    is_quiet(&mut recalled, 20, &|| sick(Health::Ok), "a recall");
}

#[test]
fn nothing_of_a_vm_that_moves_is_replaced() {
    let mut shell = with_an_old_key();
    let look = || {
        let volume = |id, lease| volume(id, vec![healthy(lease, None)]);
        vec![volume(VOLUME, LEASE), volume(VolumeId(6), OTHER)]
    };
    let vm = VmReading {
        vm: "items".parse().unwrap(),
        obstacle: None,
        dirty: Bytes::mib(1),
        arrived: None,
    };
    let moves = |shell: &mut Shell| {
        let own = super::moves::own(&[("items", 4096)]);
        shell.after(1).read(Readings { memory: memory(90), own, ..Readings::default() });
        shell.input(Input::Vms(vec![vm.clone()]));
        shell.outputs.iter().any(|output| matches!(output, Output::MoveVm { .. }))
    };
    if !(0..1000).any(|_| moves(&mut shell)) {
        panic!("the VM does not move: {:?}", shell.decisions());
    }
    shell.offers(&[]);
    let replaces = |shell: &mut Shell| {
        if shell.look(20, look()).asks_offers() {
            shell.offers(&[("c", 4)]);
        }
        shell.decides("replaces lease")
    };
    assert!(!(0..100).any(|_| replaces(&mut shell)), "{:?}", shell.decisions());
    shell.input(Input::MoveEnded { vm: "items".parse().unwrap(), end: MoveEnd::Cancelled });
    assert!((0..3).any(|_| replaces(&mut shell)), "{:?}", shell.decisions());
}

#[test]
fn ages_outlive_the_agent_and_leases_without_one_are_new() {
    let mut shell = with_ages(&[(LEASE, DAY), (LeaseId(99), DAY)], wide());
    shell.calm().after(100).calm();
    let ages = shell.node.key_ages();
    assert_eq!(ages.keys().copied().collect::<Vec<_>>(), [LEASE, OTHER]);
    assert_eq!(ages[&LEASE] - ages[&OTHER], DAY);
    assert_eq!(ages[&OTHER], Duration::from_secs(101));
}

#[test]
fn an_order_says_which_keys_it_replaces() {
    let mut shell = with_ages(&[], wide());
    shell.look(20, Vec::new());
    let refusal = |answer| match answer {
        Answer::Failed(problem) => problem.error,
        other => panic!("{other:?}"),
    };
    assert!(refusal(shell.rotate(Some(LeaseId(77)))).contains("holds no lease"));
    assert_eq!(shell.rotate(Some(LEASE)), Answer::Rotates(vec![LEASE]));
    assert_eq!(shell.rotate(None), Answer::Rotates(vec![LEASE, OTHER]));
    for (lease, new) in [(LEASE, NEW), (OTHER, LeaseId(4))] {
        assert!((0..5).any(|_| shell.calm().asks_offers()), "without a long pause");
        shell.offers(&[("c", 4)]);
        assert!(shell.decides("the operator ordered it"), "{:?}", shell.decisions());
        shell.grant(new);
        assert_eq!(shell.evacuates(lease), Some(vec![new]));
        shell.done(Work::Lease(lease), Event::Evacuated { lease, unused: Vec::new() });
    }
    for _ in 0..100 {
        assert!(!shell.calm().asks_offers(), "all is done");
    }
}

#[test]
fn a_lease_without_a_key_of_its_own_stays() {
    let mut shell = with_ages(&[(LEASE, LIFETIME)], wide());
    for _ in 0..100 {
        shell.calm_without_keys();
        assert!(!shell.asks_offers());
    }
    assert_eq!(shell.rotate(None), Answer::Rotates(Vec::new()));
    let Answer::Failed(problem) = shell.rotate(Some(LEASE)) else { panic!() };
    assert!(problem.error.contains("has no key of its own"), "{}", problem.error);
}

impl Shell {
    fn calm_without_keys(&mut self) {
        let lease = |id, lease| volume(id, vec![healthy(lease, None)]);
        let volumes = vec![lease(VOLUME, LEASE), lease(VolumeId(6), OTHER)];
        self.input(Input::Volumes(volumes));
        self.period(20);
    }
}

#[test]
fn a_lease_with_copies_is_replaced_by_one_with_copies() {
    const NEW_COPY: LeaseId = LeaseId(12);
    let protection = Protections::all(Protection::Mirror);
    let mut shell = with_ages(&[(LEASE, LIFETIME)], Config { protection, ..wide() });
    shell.input(Input::Done {
        work: Work::Volume(VolumeId(6)),
        event: Some(Event::Deactivated { volume: VolumeId(6) }),
    });
    let look = |shell: &mut Shell, copies: &[(LeaseId, Option<LeaseId>)]| {
        let leases = copies.iter().map(|(lease, copy)| healthy(*lease, *copy)).collect();
        shell.look(20, vec![volume(VOLUME, leases)]).asks_offers()
    };
    let until_asked = |shell: &mut Shell, copies: &[(LeaseId, Option<LeaseId>)]| {
        assert!((0..100).any(|_| look(shell, copies)), "{:?}", shell.decisions());
        shell.offers(&[("b", 4), ("c", 3), ("d", 2)]);
    };
    // First, the lease gets its copy.
    until_asked(&mut shell, &[(LEASE, None)]);
    shell.grant(COPY);
    shell.done(Work::Copy(COPY), Event::Copied { lease: COPY, failed: None });
    let copied = (LEASE, Some(COPY));

    until_asked(&mut shell, &[copied]);
    assert!(shell.decides("to replace lease"), "{:?}", shell.decisions());
    shell.grant(NEW);
    let [Action::Extend(live)] = &shell.begun()[..] else { panic!("{:?}", shell.begun()) };
    assert_eq!((live.volume, live.leases[0].lease), (VOLUME, NEW));
    shell.done(Work::Volume(VOLUME), Event::Extended { volume: VOLUME, unused: Vec::new() });

    // The new lease gets its copy, before any page moves there.
    until_asked(&mut shell, &[copied, (NEW, None)]);
    assert!(!shell.is_leaving(LEASE));
    shell.grant(NEW_COPY);
    let copies = |action: &Action| matches!(action, Action::Copy { of: NEW, .. });
    assert!(shell.begun().iter().any(copies), "{:?}", shell.begun());
    for _ in 0..20 {
        assert!(!look(&mut shell, &[copied, (NEW, None)]), "the copy is not there");
    }
    shell.done(Work::Copy(NEW_COPY), Event::Copied { lease: NEW_COPY, failed: None });

    let asked = |shell: &mut Shell| look(shell, &[copied, (NEW, Some(NEW_COPY))]);
    assert!((0..1300).any(|_| asked(&mut shell)), "{:?}", shell.decisions());
    shell.offers(&[]);
    assert_eq!(shell.evacuates(LEASE), Some(Vec::new()), "{:?}", shell.decisions());
    shell.done(Work::Lease(LEASE), Event::Evacuated { lease: LEASE, unused: Vec::new() });
    // The volume has left the copy with its lease.
    let done = Event::Evacuated { lease: COPY, unused: Vec::new() };
    shell.done(Work::Lease(COPY), done);
    let held: BTreeSet<_> =
        shell.node.controller().borrowed().iter().map(|held| held.lease.lease).collect();
    assert_eq!(held, BTreeSet::from([NEW, NEW_COPY]));
}

#[test]
fn a_replacement_without_copies_goes_back_in_time() {
    let (given_back, replaced, _) = without_room_for_a_copy(Protection::Mirror);
    assert!(given_back && !replaced, "its pages would have one copy only");
}

#[test]
fn copies_that_go_first_do_not_keep_an_old_key() {
    let (given_back, replaced, after) = without_room_for_a_copy(Protection::Opportunistic);
    assert!(replaced && !given_back && after >= Duration::from_secs(90), "{after:?}");
}

#[test]
fn copies_that_go_first_keep_a_host_from_no_loan() {
    // The lease and its copy are all that the host may borrow.
    let mut shell = with_a_copy(Protection::Opportunistic, Bytes::gib(2));
    assert!((0..100).any(|_| look(&mut shell, &[(LEASE, Some(COPY))])));
    shell.offers(&[("b", 1)]).grant(NEW);
}

#[test]
fn a_mirrored_lease_keeps_its_key_at_the_maximum() {
    let mut shell = with_a_copy(Protection::Mirror, Bytes::gib(2));
    assert!((0..100).any(|_| look(&mut shell, &[(LEASE, Some(COPY))])));
    shell.offers(&[("b", 8)]);
    assert!(shell.sent().is_empty() && !shell.is_leaving(LEASE));
    assert!(shell.decides("keeps the key"), "{:?}", shell.decisions());
}

#[test]
fn copies_that_go_first_keep_no_old_key_at_the_maximum() {
    let mut shell = with_a_copy(Protection::Opportunistic, Bytes::gib(2));
    // Another loan takes the rest of the maximum.
    let region = "more".parse().unwrap();
    let volume = VolumeId(8);
    let (bytes, group) = (Bytes::gib(1), Group::default());
    let request = RegionRequest { region, volume, bytes, least: bytes, group };
    let ticket = shell.ticket();
    shell.input(Input::BorrowFor { request, ticket });
    shell.offers(&[("d", 1)]).grant(LeaseId(12));
    shell.done(Work::Volume(volume), Event::Extended { volume, unused: Vec::new() });
    assert!((0..100).any(|_| look(&mut shell, &[(LEASE, Some(COPY))])));
    shell.offers(&[("b", 1)]).grant(NEW);
    assert_eq!(shell.evacuates(LEASE), Some(vec![NEW]), "{:?}", shell.decisions());
}

const COPY: LeaseId = LeaseId(11);

fn look(shell: &mut Shell, copies: &[(LeaseId, Option<LeaseId>)]) -> bool {
    let leases = copies.iter().map(|(lease, copy)| healthy(*lease, *copy)).collect();
    shell.look(20, vec![volume(VOLUME, leases)]).asks_offers()
}

/// Returns a host that has one lease, with an old key, and copies of it.
fn with_a_copy(protection: Protection, max_borrowed: Bytes) -> Shell {
    let protection = Protections::all(protection);
    let config = Config { protection, max_borrowed, ..wide() };
    let mut shell = with_ages(&[(LEASE, LIFETIME)], config);
    shell.done(Work::Volume(VolumeId(6)), Event::Deactivated { volume: VolumeId(6) });
    assert!((0..100).any(|_| look(&mut shell, &[(LEASE, None)])));
    shell.offers(&[("c", 1)]).grant(COPY);
    shell.done(Work::Copy(COPY), Event::Copied { lease: COPY, failed: None });
    shell
}

/// Lets a host replace a lease that has copies, while nobody lends for the copies of the new one.
/// Returns whether the new one goes back, whether the old one is left, and after how long.
fn without_room_for_a_copy(protection: Protection) -> (bool, bool, Duration) {
    let mut shell = with_a_copy(protection, wide().max_borrowed);
    assert!((0..100).any(|_| look(&mut shell, &[(LEASE, Some(COPY))])));
    shell.offers(&[("b", 1)]).grant(NEW);
    shell.done(Work::Volume(VOLUME), Event::Extended { volume: VOLUME, unused: Vec::new() });
    let began = shell.now;
    for _ in 0..700 {
        let asks = look(&mut shell, &[(LEASE, Some(COPY)), (NEW, None)]);
        let mut left = (shell.evacuates(NEW).is_some(), shell.evacuates(LEASE).is_some());
        if asks {
            shell.offers(&[]);
            left.1 |= shell.evacuates(LEASE).is_some();
        }
        if left.0 || left.1 {
            return (left.0, left.1, shell.now - began);
        }
    }
    panic!("nothing happens: {:?}", shell.decisions());
}
