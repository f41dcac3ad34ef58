//! Tests that memory goes to the host in need, and back.

use aquifer_api::status::Role;
use aquifer_page::Bytes;
use rustix::process::Signal;

use super::framework::{Answer, Cluster, Host, Load, Spec, lacks_rights, lives, wait_until};

#[test]
fn an_overloaded_host_borrows_and_returns_when_its_load_ends() {
    if lacks_rights() {
        return;
    }
    let a = Spec::new("a").memory(Bytes::mib(64)).set("borrow", "enabled", true);
    let cluster = Cluster::that_swaps([
        // The host borrows with half its memory free. At the load's rate, that leaves enough time
        // on any machine.
        a.set("memory", "upper", 0.5).set("memory", "lower", 0.4),
        Spec::new("b"),
    ]);
    let (a, b) = (&cluster["a"], &cluster["b"]);
    let mut load = a.slow_load(Bytes::mib(88), Bytes::mib(24));
    load.filled();
    assert_eq!((a.role(), b.role()), (Role::Borrower, Role::Lender));
    assert!(a.swapped() > Bytes::mib(16), "{}", a.swapped());
    assert!(b.stored() > Bytes::mib(16), "{}", b.stored());
    load.verify();

    load.free();
    wait_until("a and b are free", || a.is_free() && b.is_free());
    assert_eq!(a.roles(), [Role::Borrower, Role::Neutral]);
    assert_eq!(b.roles(), [Role::Lender, Role::Neutral]);
    let changes = |host: &Host| host.status().history.role_changes;
    let (of_a, of_b) = (changes(a), changes(b));
    assert!(of_b[0].at <= of_a[0].at, "b must become a lender before a borrows: {of_a:?} {of_b:?}");
    assert!(of_a[0].at < of_a[1].at && of_a[1].at <= of_b[1].at, "{of_a:?} {of_b:?}");
}

#[test]
fn two_borrowers_at_one_lender_do_not_get_in_each_others_way() {
    if lacks_rights() {
        return;
    }
    let small = |name| Spec::new(name).memory(Bytes::mib(32));
    let cluster = Cluster::that_swaps([small("a"), small("b"), Spec::new("lender")]);
    let (a, b, lender) = (&cluster["a"], &cluster["b"], &cluster["lender"]);
    a.borrow(Bytes::mib(64));
    b.borrow(Bytes::mib(64));
    let borrowers: Vec<_> =
        lender.status().loans.lent.iter().map(|lent| lent.borrower.to_string()).collect();
    assert!(borrowers.len() == 2 && borrowers.contains(&"a".to_owned()), "{borrowers:?}");

    let mut loads = [a.load(Bytes::mib(48)), b.load(Bytes::mib(48))];
    loads.iter_mut().for_each(Load::filled);
    let [mut of_a, mut of_b] = loads;
    of_a.rewrite_during(|| of_b.verify());
    of_b.verify();

    of_a.free();
    of_b.free();
    a.give_back();
    assert!(a.is_free());
    assert_eq!(lender.lent().borrower, b.host_name());
    b.give_back();
    wait_until("b and the lender are free", || b.is_free() && lender.is_free());
}

#[test]
fn an_interrupt_returns_the_pages_that_fit_and_keeps_the_rest() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::that_swaps([Spec::new("a").memory(Bytes::mib(64)), Spec::new("b")]);
    let (a, b) = (&cluster["a"], &cluster["b"]);
    a.borrow(Bytes::mib(128));
    let (mut first, mut second) = (a.load(Bytes::mib(40)), a.load(Bytes::mib(56)));
    first.filled();
    second.filled();

    let refusal = Answer::of(&mut a.aquifer(&["host", "return"]));
    refusal.must_fail(1, &["does not fit into memory", "return it when there is more free memory"]);
    first.verify();
    second.verify();

    let volume = a.volume();
    a.signal_agent(Signal::INT);
    assert!(lives(volume.pid) && Host::is_swap(&volume));
    a.restart();
    assert_eq!(a.volume().pid, volume.pid);

    drop(second);
    let status = a.signal_agent(Signal::INT);
    assert!(status.success(), "{status}");
    first.verify();
    assert!(b.is_free(), "{:?}", b.status().loans.lent);
    a.leaves_nothing(&volume);
}
