//! Tests of lent memory that a host's own VMs need: it comes back once, and is not lent again
//! before the VMs have it.

use aquifer_control::node::Input;
use aquifer_control::{Action, Message};
use aquifer_page::{Bytes, LeaseId};

use super::Shell;
use super::ledger::decisions;

fn reclaim(shell: &mut Shell, bytes: Bytes) -> Vec<LeaseId> {
    shell.input(Input::Reclaim(bytes));
    let asked = shell.sent().into_iter().filter_map(|(_, message)| match message {
        Message::MemLenFin { lease, .. } => Some(lease),
        _ => None,
    });
    asked.collect()
}

#[test]
fn vms_get_back_the_fewest_leases_that_suffice_and_once() {
    let mut shell = Shell::new();
    let leases = [shell.lend("b", 1), shell.lend("c", 2)];
    let [first] = reclaim(&mut shell, Bytes::mib(512))[..] else { panic!("one suffices") };
    assert!(leases.contains(&first));
    let (what, _) = decisions(&shell).remove(0);
    assert!(what.ends_with("VMs of this host need the memory"), "{what}");
    assert_eq!(reclaim(&mut shell, Bytes::gib(1)), [], "that much is on its way");
    let [second] = reclaim(&mut shell, Bytes::gib(5))[..] else { panic!("all must come back") };
    assert_ne!(first, second);
    assert_eq!(reclaim(&mut shell, Bytes::gib(5)), [], "there is no more");
}

#[test]
fn vms_do_not_wait_for_a_borrower_that_never_gives() {
    let mut shell = Shell::new();
    let lease = shell.lend("b", 1);
    assert_eq!(reclaim(&mut shell, Bytes::gib(1)), [lease]);
    for (seconds, recallable) in [(30, Bytes::gib(1)), (29, Bytes::ZERO)] {
        assert_eq!(shell.node.controller().recallable(), Bytes::gib(1));
        shell.after(seconds).period(20);
        assert_eq!(shell.node.controller().recallable(), recallable, "after {seconds} more");
    }
    assert_eq!(shell.node.ledger().lent, Bytes::gib(1), "it is lent all the same");
}

#[test]
fn what_vms_get_back_is_not_lent_again_at_once() {
    let mut shell = Shell::new();
    let lease = shell.lend("b", 1);
    assert_eq!(reclaim(&mut shell, Bytes::gib(1)), [lease]);
    shell.hear("b", Message::MemBorFin { lease, generation: 0 });
    assert!(shell.begun().contains(&Action::FreeLease { lease }), "{:?}", shell.begun());
    shell.freed(lease).after(8).period(20);
    assert_eq!(shell.node.controller().spare(), Bytes::ZERO);
    shell.after(1).period(20);
    assert!(shell.node.controller().spare() > Bytes::ZERO, "the VMs had time to take it");
}
