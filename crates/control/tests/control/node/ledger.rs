//! Tests of what a node lends beside the promises to its own VMs and regions.

use aquifer_control::ledger::{OwnMemory, RegionMemory, VmMemory};
use aquifer_control::node::{Output, Readings};
use aquifer_control::{Message, Reason, Subject};
use aquifer_page::{Bytes, Group};

use super::{Shell, memory};
use crate::host::{TOTAL, name, req};

/// A VM of which little is in RAM yet.
pub(super) fn vm(floor: u64, size: u64) -> OwnMemory {
    let vm = VmMemory {
        name: "web".parse().unwrap(),
        floor: Bytes::gib(floor),
        size: Bytes::gib(size),
        reserve: Bytes::ZERO,
        resident: Bytes::mib(64),
    };
    OwnMemory { vms: vec![vm], ..OwnMemory::default() }
}

fn owns(shell: &mut Shell, own: OwnMemory) {
    shell.after(1).read(Readings { memory: memory(20), own, ..Readings::default() });
}

/// Returns the spare memory and the reason in the rejection just sent.
fn rejection(shell: &Shell) -> (Bytes, Reason) {
    match &shell.sent()[..] {
        [(_, Message::MemBorRej { spare, reason, .. })] => (*spare, *reason),
        other => panic!("one mem_bor_rej was expected, not {other:?}"),
    }
}

/// Returns the decisions of the last input, each with its subjects.
pub(super) fn decisions(shell: &Shell) -> Vec<(String, Vec<Subject>)> {
    let decisions = shell.outputs.iter().filter_map(|output| match output {
        Output::Decision { what, about, .. } => Some((what.clone(), about.clone())),
        _ => None,
    });
    decisions.collect()
}

#[test]
fn a_host_does_not_lend_into_a_vms_floor() {
    let mut shell = Shell::new();
    shell.period(20);
    assert_eq!(shell.node.controller().spare(), Bytes::gib(6), "T_upper limits it");
    owns(&mut shell, vm(5, 5));
    // 2 GiB are used, 64 MiB of them by the VM.
    let free = TOTAL - Bytes::gib(2) - Bytes::gib(5) + Bytes::mib(64);
    assert_eq!(shell.node.ledger().available(), free);
    assert_eq!(shell.node.controller().spare(), free);
    shell.hear("b", req(1, Bytes::gib(4)));
    assert_eq!(rejection(&shell), (free, Reason::NoRoom));
    let (what, about) = decisions(&shell).remove(0);
    assert!(what.contains("by the ledger (of 10GiB, 1.9GiB is reserved, 5GiB promised"), "{what}");
    assert_eq!(about, [Subject::Host(name("b")), Subject::Vm("web".parse().unwrap())]);
}

#[test]
fn a_grant_names_the_ledger_that_limits_it() {
    let mut shell = Shell::new();
    owns(&mut shell, vm(1, 5));
    shell.hear("b", req(1, Bytes::gib(2)));
    let (what, about) = decisions(&shell).remove(0);
    assert!(what.starts_with("grants 2GiB to b") && what.contains("by the ledger"), "{what}");
    assert!(matches!(&about[..], [Subject::Host(_), Subject::Lease(_), Subject::Vm(_)]));
    // Memory that is granted is promised once.
    let free = TOTAL - Bytes::gib(2) - Bytes::gib(5) - Bytes::gib(2) + Bytes::mib(64);
    assert_eq!(shell.node.ledger().available(), free);
    shell.hear("c", req(2, Bytes::gib(2)));
    assert_eq!(rejection(&shell), (free, Reason::NoRoom));
}

#[test]
fn a_small_vm_limits_nothing_and_is_not_named() {
    let mut shell = Shell::new();
    owns(&mut shell, vm(1, 1));
    assert_eq!(shell.node.controller().spare(), Bytes::gib(6));
    shell.hear("b", req(1, Bytes::gib(7)));
    let (what, about) = decisions(&shell).remove(0);
    assert!(!what.contains("ledger"), "{what}");
    assert_eq!(about, [Subject::Host(name("b"))]);
}

#[test]
fn a_vanished_vm_and_a_smaller_cache_are_lent() {
    let mut shell = Shell::new();
    let region = |cache| RegionMemory {
        name: "items".parse().unwrap(),
        group: Group::default(),
        size: Bytes::gib(8),
        vm_size: None,
        cache: Bytes::gib(cache),
        resident: Bytes::ZERO,
        shared: Bytes::ZERO,
        auto: None,
        spilled: None,
    };
    owns(&mut shell, OwnMemory { regions: vec![region(4)], ..vm(2, 4) });
    assert_eq!(shell.node.controller().spare(), Bytes::mib(64));
    owns(&mut shell, OwnMemory { regions: vec![region(4)], ..OwnMemory::default() });
    assert_eq!(shell.node.controller().spare(), Bytes::gib(4));
    owns(&mut shell, OwnMemory { regions: vec![region(1)], ..OwnMemory::default() });
    assert_eq!(shell.node.controller().spare(), Bytes::gib(6), "T_upper limits it again");
}
