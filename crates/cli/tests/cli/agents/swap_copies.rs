//! Tests of hosts that keep two copies at lenders of the pages that they swap out.

use aquifer_api::status::{EventKind, Held, Role, SecondCopy};
use aquifer_page::Bytes;

use super::framework::{Answer, Cluster, Host, Load, Spec, lacks_rights, wait_until};

/// Starts a host `a` that swaps with two copies, three others, and the load that swaps.
fn start_swapping(protection: &str) -> (Cluster, Load) {
    let a = Spec::new("a").memory(Bytes::mib(32)).set("borrow", "io_timeout", "4s");
    let a = a.set("borrow", "protection_of_swap", protection);
    let cluster = Cluster::that_swaps([a, Spec::new("b"), Spec::new("c"), Spec::new("d")]);
    cluster["a"].borrow(Bytes::mib(64));
    let mut load = cluster["a"].load(Bytes::mib(48));
    load.filled();
    (cluster, load)
}

/// Returns the lease of the host's only volume, if both copies are whole.
fn whole(a: &Host) -> Option<(Held, SecondCopy)> {
    let volume = a.volume();
    let [held] = &volume.leases[..] else { return None };
    let copy = held.copy.clone()?;
    let is_whole = copy.first_answers
        && copy.answers
        && copy.lacks.saturating_add(copy.first_lacks) == Bytes::ZERO;
    is_whole.then(|| (held.clone(), copy))
}

#[track_caller]
fn until_whole(a: &Host) -> (Held, SecondCopy) {
    until_whole_without(a, &[])
}

/// Waits until both copies are whole, on lenders other than these.
#[track_caller]
fn until_whole_without(a: &Host, gone: &[&str]) -> (Held, SecondCopy) {
    let found = || {
        let is_gone = |lender: &str| gone.contains(&lender);
        whole(a)
            .filter(|(held, copy)| !is_gone(held.lender.as_str()) && !is_gone(copy.lender.as_str()))
    };
    wait_until("both copies are whole", || found().is_some());
    found().unwrap()
}

/// Ends the load, and waits until no host has anything of it.
#[track_caller]
fn gives_all_back(cluster: &Cluster, mut load: Load) {
    let a = &cluster["a"];
    let volume = a.volume();
    load.free();
    a.give_back();
    a.leaves_nothing(&volume);
    wait_until("all hosts are free", || {
        ["a", "b", "c", "d"].iter().all(|host| cluster[*host].is_free())
    });
}

#[test]
fn two_lenders_of_swap_die_in_turn_and_no_page_is_lost() {
    if lacks_rights() {
        return;
    }
    let (cluster, mut load) = start_swapping("mirror");
    let a = &cluster["a"];
    let (held, copy) = until_whole(a);
    assert_ne!(held.lender, copy.lender);
    let loans = a.status().loans;
    assert!(loans.at_risk.iter().all(|risk| risk.bytes == Bytes::ZERO), "{:?}", loans.at_risk);
    let shown = Answer::of(&mut a.aquifer(&["status"])).stdout;
    assert!(shown.contains(&format!("copy at {}", copy.lender)), "{shown}");
    let volume = a.volume().volume.to_string();
    let why = Answer::of(&mut a.aquifer(&["why", &volume])).stdout;
    assert!(why.contains("keeps second copies of the pages in lease"), "{why}");

    // The lender of the first copies dies for good, while the load writes.
    load.order("rewrite");
    cluster[held.lender.as_str()].kill_agent();
    load.filled();
    load.verify();
    let first = held.lender;
    let (held, copy) = until_whole_without(a, &[first.as_str()]);
    load.verify();

    // Then the lender of the second ones.
    load.order("rewrite");
    cluster[copy.lender.as_str()].kill_agent();
    load.filled();
    load.verify();
    assert_eq!(a.volume().leases[0].lender, held.lender);
    assert_eq!(a.volume().spilled, Bytes::ZERO);
    let events = a.status().history.events;
    assert!(events.iter().all(|event| event.kind != EventKind::LeaseLost), "{events:?}");

    cluster[first.as_str()].restart();
    cluster[copy.lender.as_str()].restart();
    gives_all_back(&cluster, load);
}

#[test]
fn copies_of_swap_outlive_an_agent_and_make_room() {
    if lacks_rights() {
        return;
    }
    let (cluster, mut load) = start_swapping("opportunistic");
    let a = &cluster["a"];
    let (held, copy) = until_whole(a);
    let lender = &cluster[copy.lender.as_str()];
    let lent = lender.lent();
    assert!(lent.goes_first && lent.lease == copy.lease, "{lent:?}");
    assert_eq!(lender.role(), Role::Neutral, "copies that go first make no lender");
    assert_eq!(lender.status().ledger.mirror, held.capacity);
    let shown = Answer::of(&mut lender.aquifer(&["status"])).stdout;
    assert!(shown.contains("swap (mirror)"), "{shown}");

    a.kill_agent();
    load.verify();
    a.restart();
    let (now, second) = until_whole(a);
    assert_eq!((now.lease, second.lease), (held.lease, copy.lease));

    // A lender that drains gets its copies back at once, and the other one its pages.
    for leaving in [&copy.lender, &held.lender] {
        load.order("rewrite");
        let drained =
            Answer::of(&mut cluster[leaving.as_str()].aquifer(&["host", "drain", "--json"]));
        assert_eq!(drained.code, Some(0), "{drained:?}");
        load.filled();
        assert!(cluster[leaving.as_str()].lease_files().is_empty());
        load.verify();
        let undrained = Answer::of(&mut cluster[leaving.as_str()].aquifer(&["host", "undrain"]));
        assert_eq!(undrained.code, Some(0), "{undrained:?}");
        until_whole_without(a, &[]);
    }
    load.verify();
    assert_eq!(a.volume().spilled, Bytes::ZERO);
    gives_all_back(&cluster, load);
}
