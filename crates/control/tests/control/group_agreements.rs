//! Tests of the catalog of agreements, and of the decision which host asks which.

use std::collections::BTreeMap;
use std::time::Duration;

use aquifer_control::group::agreements::{
    Asking, Catalog, Edition, Holding, KeyId, LARGEST_STEP, Line, MOST_LINES, Next, State,
    TermsHash,
};
use aquifer_page::{Group, HostName};
use proptest::prelude::*;

fn host(name: &str) -> HostName {
    name.parse().unwrap()
}

fn blue() -> Group {
    "blue".parse().unwrap()
}

fn edition(version: u64, hash: u64) -> Edition {
    Edition { version, hash: TermsHash(hash) }
}

fn agreed(version: u64, hash: u64) -> Line {
    line(State::Agreed(edition(version, hash)))
}

fn line(state: State) -> Line {
    Line { state, by: host("a"), hosts: Vec::new() }
}

/// A catalog of the group blue with these keys.
fn catalog(lines: impl IntoIterator<Item = (u64, Line)>) -> Catalog {
    let mut catalog = Catalog::default();
    for (key, line) in lines {
        catalog.merge(&blue(), KeyId(key), line);
    }
    catalog
}

#[test]
fn a_version_then_a_hash_decides_and_a_removal_is_final() {
    let mut known = Catalog::default();
    let mut says = |line| known.merge(&blue(), KeyId(1), line);
    assert!(says(agreed(1, 9)));
    assert!(agreed(1, 9).is_rival(&agreed(1, 8)) && !agreed(1, 9).is_rival(&agreed(1, 9)));
    assert!(!agreed(1, 9).is_rival(&agreed(2, 8)) && !agreed(1, 9).is_rival(&line(State::Removed)));
    assert!(!says(agreed(1, 9)), "twice");
    assert!(says(agreed(2, 3)));
    assert!(!says(agreed(1, 10)), "late");
    assert!(says(agreed(2, 4)) && !says(agreed(2, 3)), "made at once");
    assert!(says(line(State::Removed)));
    assert!(!says(agreed(9, u64::MAX)), "from a host that was away");
    assert!(known.is_removed(&blue(), KeyId(1)) && known.live(&blue()).is_empty());
    assert!(known.merge(&blue(), KeyId(2), agreed(1, 1)), "created again");
    assert_eq!(known.live(&blue()).len(), 1);
}

#[test]
fn a_host_wants_what_it_lacks_and_never_another_key() {
    let wants = |known: &Catalog, holding| known.wanted(&host("b"), |_| holding).len();
    let one = catalog([(1, agreed(2, 5))]);
    assert_eq!(wants(&one, Holding::Nothing), 1);
    assert_eq!(wants(&one, Holding::Unreadable), 0);
    assert_eq!(wants(&one, Holding::Agreement(KeyId(1), edition(1, 9))), 1);
    assert_eq!(wants(&one, Holding::Agreement(KeyId(1), edition(2, 5))), 0);
    assert_eq!(wants(&one, Holding::Agreement(KeyId(1), edition(3, 0))), 0);
    assert_eq!(wants(&one, Holding::Agreement(KeyId(2), edition(1, 0))), 0);
    let two = catalog([(1, agreed(2, 5)), (2, agreed(7, 0))]);
    assert_eq!(wants(&two, Holding::Nothing), 0, "an operator must choose");
    assert_eq!(wants(&two, Holding::Agreement(KeyId(1), edition(1, 0))), 1);
    let settled = catalog([(1, line(State::Removed)), (2, agreed(7, 0))]);
    assert_eq!(wants(&settled, Holding::Nothing), 1);
    for (list, wanted) in [("b", 1), ("b*", 1), ("*", 1), ("c", 0), ("bb", 0)] {
        let known = catalog([(1, Line { hosts: vec![list.to_owned()], ..agreed(1, 0) })]);
        assert_eq!(wants(&known, Holding::Nothing), wanted, "{list}");
    }
}

#[test]
fn a_liars_catalog_has_an_end() {
    let full = catalog((0..10_000).map(|key| (key, line(State::Removed))));
    assert_eq!(full.lines().count(), MOST_LINES);
    assert!(full.is_full());
    // This host's own lines are told nevertheless.
    let mut full = full;
    full.hold(&blue(), KeyId(20_000), agreed(1, 1));
    assert!(full.line(&blue(), KeyId(20_000)).is_some());
    let hosts = vec!["h".repeat(1000)];
    let removal = Line { hosts: hosts.clone(), ..line(State::Removed) };
    assert!(!Catalog::default().admits(&blue(), KeyId(1), &removal));
    assert!(!Catalog::default().merge(&blue(), KeyId(1), Line { hosts, ..agreed(1, 1) }));
}

#[test]
fn a_liar_cannot_use_up_the_versions() {
    let mut known = Catalog::default();
    let mut says = |version| known.merge(&blue(), KeyId(1), agreed(version, 0));
    assert!(!says(u64::MAX) && !says(LARGEST_STEP + 1));
    assert!(says(LARGEST_STEP) && says(2 * LARGEST_STEP) && !says(u64::MAX));
    let wanted = known.wanted(&host("b"), |_| Holding::Nothing).remove(0);
    let answers = |version| wanted.is_answered_by(&blue(), edition(version, 0));
    assert!(answers(2 * LARGEST_STEP) && answers(3 * LARGEST_STEP));
    assert!(!answers(2 * LARGEST_STEP - 1) && !answers(u64::MAX));
    assert!(!wanted.is_answered_by(&"red".parse().unwrap(), wanted.edition));
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn each_digest_is_asked_for_once() {
    let (mut asking, known) = (Asking::default(), Catalog::default());
    let wanted = known.wanted(&host("c"), |_| Holding::Nothing);
    let told = |a, b| BTreeMap::from([(host("a"), a), (host("b"), b)]);
    let next = |asking: &mut Asking, own, told: &_| asking.next(SECOND, (own, &wanted), told, 0);
    assert_eq!(next(&mut asking, 1, &told(1, 1)), Next::Nothing);
    assert_eq!(next(&mut asking, 1, &told(1, 2)), Next::Ask(host("b")));
    asking.answered(SECOND, &host("b"), 2, &[]);
    assert_eq!(next(&mut asking, 2, &told(1, 2)), Next::Nothing, "a is behind");
    assert_eq!(next(&mut asking, 3, &told(2, 2)), Next::Nothing);
    assert_eq!(next(&mut asking, 3, &told(4, 2)), Next::Ask(host("a")));
}

#[test]
fn hosts_ask_at_different_times_and_not_all_the_same() {
    let told: BTreeMap<_, _> = (0..100).map(|n| (host(&format!("h{n:02}")), 2)).collect();
    let mut asked = std::collections::BTreeSet::new();
    let mut times = std::collections::BTreeSet::new();
    for random in (0..1000).map(|number: u64| number * 7919) {
        let mut asking = Asking::default();
        let mut now = SECOND;
        if let Next::At(at) = asking.next(now, (1, &[]), &told, random) {
            now = at;
        }
        assert!(now <= SECOND + SECOND / 2);
        times.insert(now);
        match asking.next(now, (1, &[]), &told, random) {
            Next::Ask(host) => asked.insert(host),
            other => panic!("{other:?}"),
        };
    }
    assert!(asked.len() == 100 && times.len() > 100, "{} {}", asked.len(), times.len());
}

#[test]
fn a_host_that_fails_is_asked_more_and_more_rarely() {
    let (mut asking, told) = (Asking::default(), BTreeMap::from([(host("a"), 2)]));
    let mut now = SECOND;
    let mut waits = Vec::new();
    for _ in 0..12 {
        assert_eq!(asking.next(now, (1, &[]), &told, 0), Next::Ask(host("a")));
        asking.failed(now, &host("a"), 2);
        let Next::At(at) = asking.next(now, (1, &[]), &told, 0) else { panic!() };
        waits.push((at - now).as_secs());
        now = at;
    }
    assert_eq!(waits[..3], [2, 4, 8]);
    assert_eq!(waits[11], 300);
    // A host with news is asked at once, and one that went away and came back.
    asking.failed(now, &host("a"), 2);
    let anew = BTreeMap::from([(host("a"), 3)]);
    assert_eq!(asking.next(now, (1, &[]), &anew, 0), Next::Ask(host("a")));
    assert_eq!(asking.next(now, (1, &[]), &BTreeMap::new(), 0), Next::Nothing);
    asking.failed(now, &host("a"), 2);
    asking.next(now, (1, &[]), &BTreeMap::new(), 0);
    assert_eq!(asking.next(now, (1, &[]), &told, 0), Next::Ask(host("a")));
}

#[test]
fn a_command_ends_the_pauses() {
    let (mut asking, told) =
        (Asking::default(), BTreeMap::from(["a", "b"].map(|it| (host(it), 5))));
    let known = catalog([(1, agreed(1, 0))]);
    let wanted = known.wanted(&host("c"), |_| Holding::Nothing);
    let next = |asking: &mut Asking| asking.next(SECOND, (5, &wanted), &told, 0);
    for name in ["a", "b"] {
        asking.failed(SECOND, &host(name), 5);
    }
    assert!(matches!(next(&mut asking), Next::At(_)));
    asking.retry();
    for name in ["a", "b"] {
        asking.hurry();
        assert_eq!(next(&mut asking), Next::Ask(host(name)));
        asking.answered(SECOND, &host(name), 5, &wanted);
    }
    asking.hurry();
    assert!(matches!(next(&mut asking), Next::At(_)), "each once");
}

#[test]
fn what_is_wanted_is_looked_for_where_it_may_be() {
    let known = catalog([(1, Line { hosts: vec!["c*".to_owned()], ..agreed(1, 0) })]);
    let wanted = known.wanted(&host("c1"), |_| Holding::Nothing);
    let told = ["a", "b", "c2"].map(|name| (host(name), 5));
    let told = BTreeMap::from(told);
    let mut asking = Asking::default();
    let mut asked = Vec::new();
    let mut now = SECOND;
    while asked.len() < 3 {
        match asking.next(now, (5, &wanted), &told, 0) {
            Next::Ask(host) => {
                asking.answered(now, &host, 5, &wanted);
                asked.push(host);
            }
            Next::At(at) => now = at,
            Next::Nothing => panic!(),
        }
    }
    assert_eq!(asked, ["a", "c2", "a"].map(host), "b may not have it");
    assert_eq!(asking.next(now, (5, &[]), &told, 0), Next::Nothing);
}

#[test]
fn what_no_host_has_is_asked_for_more_and_more_rarely() {
    let known = catalog([(1, agreed(1, 0))]);
    let wanted = known.wanted(&host("c"), |_| Holding::Nothing);
    let told: BTreeMap<_, _> = (0..1000).map(|n| (host(&format!("h{n:03}")), 5)).collect();
    let (mut asking, mut now, mut asked) = (Asking::default(), SECOND, 0);
    while now < SECOND * 3600 {
        match asking.next(now, (5, &wanted), &told, 0) {
            Next::Ask(host) => {
                asking.answered(now, &host, 5, &wanted);
                asked += 1;
            }
            Next::At(at) => now = at,
            Next::Nothing => panic!(),
        }
    }
    assert!((10..30).contains(&asked), "{asked}");
    // Other news come at once.
    let mut told = told;
    told.insert(host("a"), 6);
    asking.hurry();
    assert_eq!(asking.next(now, (5, &wanted), &told, 0), Next::Ask(host("a")));
}

fn any_line() -> impl Strategy<Value = (u64, Line)> {
    let state = prop_oneof![
        4 => (1..4u64, 0..3u64).prop_map(|(version, hash)| State::Agreed(edition(version, hash))),
        1 => Just(State::Removed),
    ];
    (0..3u64, state).prop_map(|(key, state)| (key, line(state)))
}

proptest! {
    #![proptest_config(crate::cases(256))]
    #[test]
    fn catalogs_are_equal_whatever_the_order(
        lines in prop::collection::vec(any_line(), 0..12),
        order in prop::collection::vec(any::<prop::sample::Index>(), 0..30),
    ) {
        let all = catalog(lines.clone());
        let mut late = Catalog::default();
        for at in order {
            if !lines.is_empty() {
                let (key, line) = at.get(&lines).clone();
                late.merge(&blue(), KeyId(key), line);
            }
        }
        for (group, key, line) in all.lines() {
            late.merge(group, key, line.clone());
        }
        prop_assert_eq!(late, all);
    }
}
