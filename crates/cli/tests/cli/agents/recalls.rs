//! Tests of a lender that wants its memory back while it is in use.

use aquifer_api::status::{LoanState, Role};
use aquifer_page::Bytes;

use super::framework::{Cluster, Host, Load, Spec, lacks_rights, wait_until};

/// Starts a borrower `a` that swaps to `b` and `c`, neither of which has room for all.
fn over_two_lenders(third: Option<Spec>) -> (Cluster, Load) {
    let hosts = [
        Spec::new("a").memory(Bytes::mib(32)),
        // Each has one extent below T_upper.
        Spec::new("b").memory(Bytes::mib(96)),
        Spec::new("c").memory(Bytes::mib(96)),
    ];
    let cluster = Cluster::that_swaps(hosts.into_iter().chain(third));
    let a = &cluster["a"];
    let borrowed = a.borrow(Bytes::mib(128));
    assert_eq!((borrowed.leases.len(), borrowed.bytes), (2, Bytes::mib(128)));
    let mut load = a.load(Bytes::mib(108));
    load.filled();
    for lender in ["b", "c"] {
        assert!(cluster[lender].stored() > Bytes::mib(4), "{lender}: {}", cluster[lender].stored());
    }
    (cluster, load)
}

/// Overloads `b`, which then asks for its memory back.
fn overload(b: &Host) -> Load {
    let mut own = b.load(Bytes::mib(72));
    own.filled();
    wait_until("b asks for its memory back", || {
        b.status().loans.lent.iter().all(|lent| lent.state == LoanState::Recalled)
    });
    own
}

/// Waits until `b` has its memory back; it must not free pages that are still in use.
fn wait_until_back(cluster: &Cluster) {
    let (a, b) = (&cluster["a"], &cluster["b"]);
    wait_until("b has its memory back", || {
        let freed = b.lease_files().is_empty();
        let in_use = a.held_of("b").is_some();
        assert!(!(freed && in_use), "b freed the pages while a still holds the lease");
        freed
    });
    assert_eq!(b.roles(), [Role::Lender, Role::Neutral]);
}

#[track_caller]
fn give_back(cluster: &Cluster, mut load: Load, lenders: &[&str]) {
    load.free();
    cluster["a"].give_back();
    wait_until("all hosts are free", || {
        cluster["a"].is_free() && lenders.iter().map(|lender| &cluster[*lender]).all(Host::is_free)
    });
}

#[test]
fn pages_in_use_move_from_an_overloaded_lender_to_a_third_host() {
    if lacks_rights() {
        return;
    }
    let aside = Spec::new("d").set("lend", "enabled", false);
    let (cluster, mut load) = over_two_lenders(Some(aside));
    let (a, d) = (&cluster["a"], &cluster["d"]);
    d.signal_agent(rustix::process::Signal::TERM);
    d.configure(|config| {
        config["lend"].as_table_mut().unwrap().insert("enabled".to_owned(), true.into());
    });
    d.restart();

    let mut own = None;
    load.rewrite_during(|| {
        own = Some(overload(&cluster["b"]));
        wait_until_back(&cluster);
    });
    own.unwrap().verify();
    assert!(a.held_of("d").is_some_and(|held| held.placed > Bytes::ZERO), "{:?}", a.volume());
    assert_eq!(a.volume().spilled, Bytes::ZERO);
    assert!(d.stored() > Bytes::mib(4), "{}", d.stored());
    give_back(&cluster, load, &["b", "c", "d"]);
}

#[test]
fn pages_of_an_overloaded_lender_go_to_a_file_if_none_has_room() {
    if lacks_rights() {
        return;
    }
    let (cluster, mut load) = over_two_lenders(None);
    let a = &cluster["a"];
    let mut own = None;
    load.rewrite_during(|| {
        // No pages move while a's agent is away, so `b` must free none.
        a.kill_agent();
        own = Some(overload(&cluster["b"]));
        assert!(cluster["b"].stored() > Bytes::mib(4));
        a.restart();
        wait_until_back(&cluster);
    });
    own.unwrap().verify();
    let volume = a.volume();
    assert!(volume.spilled >= Bytes::mib(64), "{volume:?}");
    assert_eq!(
        volume.leases.iter().filter(|held| held.lender.as_str() != "c").count(),
        0,
        "{volume:?}"
    );
    give_back(&cluster, load, &["b", "c"]);
    let left: Vec<_> = std::fs::read_dir(a.spill()).into_iter().flatten().flatten().collect();
    assert!(left.is_empty(), "{left:?}");
}
