//! Tests of agents that are killed, upgraded and restarted while their leases are in use.

use aquifer_api::status::Role;
use aquifer_page::Bytes;
use rustix::process::Signal;

use super::framework::{Cluster, Host, Load, Spec, lacks_rights, lives, wait_until};

/// Starts a borrower `a` that swaps to a lender `b`, and the load that swaps.
fn start_swapping() -> (Cluster, Load) {
    let a = Spec::new("a").memory(Bytes::mib(32)).set("borrow", "io_timeout", "20s");
    let cluster = Cluster::that_swaps([a, Spec::new("b")]);
    cluster["a"].borrow(Bytes::mib(128));
    let mut load = cluster["a"].load(Bytes::mib(48));
    load.filled();
    assert!(cluster["b"].stored() > Bytes::mib(8), "{}", cluster["b"].stored());
    (cluster, load)
}

#[track_caller]
fn give_back(cluster: &Cluster, load: &mut Load) {
    load.free();
    cluster["a"].give_back();
    wait_until("a and b are free", || cluster["a"].is_free() && cluster["b"].is_free());
}

#[test]
fn swapped_pages_outlive_a_killed_or_upgraded_lender_agent() {
    if lacks_rights() {
        return;
    }
    let (cluster, mut load) = start_swapping();
    let (a, b) = (&cluster["a"], &cluster["b"]);
    for signal in [Signal::KILL, Signal::TERM] {
        let before = b.lent();
        load.rewrite_during(|| {
            b.signal_agent(signal);
            assert!(b.stored() > Bytes::mib(8), "{signal:?}: {}", b.stored());
            b.restart();
            let after = b.lent();
            assert_eq!((after.lease, after.capacity), (before.lease, before.capacity));
            assert_eq!(b.role(), Role::Lender);
        });
        assert_eq!(
            a.held_of("b").map(|held| (held.lease, held.state)),
            Some((before.lease, "ok".to_owned()))
        );
    }
    give_back(&cluster, &mut load);
}

#[test]
fn a_volume_outlives_its_agent_and_the_next_one_returns_it() {
    if lacks_rights() {
        return;
    }
    let (cluster, mut load) = start_swapping();
    let a = &cluster["a"];
    for signal in [Signal::KILL, Signal::TERM] {
        let before = a.volume();
        load.rewrite_during(|| {
            a.signal_agent(signal);
        });
        assert!(lives(before.pid) && Host::is_swap(&before), "{signal:?}");
        load.rewrite_during(|| a.restart());
        let after = a.volume();
        assert_eq!(
            (after.volume, after.pid, &after.device),
            (before.volume, before.pid, &before.device)
        );
        assert_eq!(a.role(), Role::Borrower);
    }
    let volume = a.volume();
    give_back(&cluster, &mut load);
    a.leaves_nothing(&volume);
}

#[test]
fn both_agents_can_be_away_at_once() {
    if lacks_rights() {
        return;
    }
    let (cluster, mut load) = start_swapping();
    load.rewrite_during(|| {
        cluster["a"].kill_agent();
        cluster["b"].kill_agent();
        cluster["b"].restart();
        cluster["a"].restart();
    });
    give_back(&cluster, &mut load);
}
