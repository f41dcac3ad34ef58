//! Tests of VMs that come from other hosts: the ledger has room for them, or they stay there.

use aquifer_control::Subject;
use aquifer_control::ledger::{Claim, Purpose};
use aquifer_control::node::{Answer, Input, Readings, Threshold};
use aquifer_page::{Bytes, Group};
use proptest::prelude::*;

use super::ledger::decisions;
use super::{Shell, memory};
use crate::host::name;

const UPPER: Option<Threshold> = Some(Threshold::Upper);
const LOWER: Option<Threshold> = Some(Threshold::Lower);

impl Shell {
    /// Offers a VM with a cache of this many GiB; returns the reason against it.
    fn offered(&mut self, vm: &str, gib: u64, below: Option<Threshold>) -> Result<(), String> {
        let claim = Claim {
            name: vm.parse().unwrap(),
            purpose: Purpose::Cache,
            group: Group::default(),
            bytes: Bytes::gib(gib),
            reserve: Bytes::ZERO,
        };
        let ticket = self.ticket();
        self.input(Input::TakeVm { from: name("b"), claim, below, ticket });
        match self.answer() {
            Answer::Claimed => Ok(()),
            Answer::Failed(problem) => Err(problem.error),
            other => panic!("{other:?}"),
        }
    }

    fn lose(&mut self, vm: &str) -> &mut Self {
        let why = "it lacks avx2".to_owned();
        self.input(Input::LostVm { from: name("b"), vm: vm.parse().unwrap(), why })
    }
}

/// A host that uses 2 of 10 GiB. T_lower is 6 GiB, and T_upper 8 GiB.
fn host() -> Shell {
    let mut shell = Shell::new();
    shell.period(20);
    shell
}

#[test]
fn two_vms_that_come_at_once_do_not_get_the_same_room() {
    let mut shell = host();
    assert_eq!(shell.node.room(), Bytes::gib(6));
    assert_eq!(shell.offered("web", 4, UPPER), Ok(()));
    assert_eq!(shell.node.room(), Bytes::gib(2), "at once, although no page is here yet");
    let why = shell.offered("db", 4, UPPER).unwrap_err();
    assert_eq!(why, "its cache may take 4GiB, and only 2GiB fit below T_upper, 8GiB");
    assert_eq!(shell.offered("db", 2, UPPER), Ok(()));
    assert!(shell.offered("more", 1, UPPER).is_err());
}

#[test]
fn a_vm_that_flees_overload_comes_only_below_t_lower() {
    let mut shell = host();
    let why = shell.offered("web", 5, LOWER).unwrap_err();
    assert_eq!(why, "its cache may take 5GiB, and only 4GiB fit below T_lower, 6GiB");
    assert_eq!(shell.offered("web", 4, LOWER), Ok(()));
    assert!(shell.offered("db", 1, LOWER).is_err());
    assert_eq!(shell.offered("db", 1, UPPER), Ok(()), "a drain may use the rest");
}

#[test]
fn an_operator_may_choose_any_host_with_room_in_its_ledger() {
    let mut shell = host();
    let why = shell.offered("web", 9, None).unwrap_err();
    assert!(why.contains("it takes 9GiB of this host's RAM, and 8GiB are left for it"), "{why}");
    assert_eq!(shell.offered("web", 8, None), Ok(()));
}

#[test]
fn a_host_offers_a_vm_just_the_room_that_it_takes_it_for() {
    for below in [Threshold::Upper, Threshold::Lower] {
        let mut shell = host();
        assert_eq!(shell.offered("first", 1, Some(below)), Ok(()));
        let room = shell.node.room_for_vms(below);
        let gib = room.0 >> 30;
        assert_eq!(Bytes::gib(gib), room);
        assert!(shell.offered("web", gib + 1, Some(below)).is_err(), "{below:?}");
        assert_eq!(shell.offered("web", gib, Some(below)), Ok(()));
        assert_eq!(shell.node.room_for_vms(below), Bytes::ZERO);
    }
}

#[test]
fn a_vm_offered_twice_counts_once_and_one_that_stays_does_not() {
    let mut shell = host();
    assert_eq!(shell.offered("web", 4, UPPER), Ok(()));
    assert_eq!(shell.offered("web", 4, UPPER), Ok(()), "the first answer was lost");
    assert_eq!(shell.node.room(), Bytes::gib(2));
    assert!(shell.offered("web", 7, UPPER).is_err());
    assert_eq!(shell.node.room(), Bytes::gib(2), "the former promise stays");
    assert_eq!(shell.lose("web").node.room(), Bytes::gib(6));
    assert_eq!(shell.lose("web").node.room(), Bytes::gib(6), "the word came twice");
}

#[test]
fn the_promise_to_a_vm_that_never_comes_ends() {
    let mut shell = host();
    assert_eq!(shell.offered("web", 6, UPPER), Ok(()));
    assert_eq!(shell.after(50).period(20).node.room(), Bytes::ZERO);
    assert_eq!(shell.after(10).period(20).node.room(), Bytes::gib(6));
}

#[test]
fn a_vm_that_the_ledger_does_not_count_takes_no_room() {
    let mut shell = host();
    assert_eq!(shell.offered("web", 0, UPPER), Ok(()));
    assert_eq!(shell.node.room(), Bytes::gib(6));
    shell.input(Input::Drain { on: true, stored: Bytes::ZERO, vms: true });
    assert!(shell.offered("web", 0, UPPER).is_err());
}

#[test]
fn a_host_that_drains_or_knows_no_memory_takes_no_vm() {
    let mut shell = Shell::new();
    assert!(shell.offered("web", 1, UPPER).unwrap_err().contains("only just started"));
    shell.period(20).input(Input::Drain { on: true, stored: Bytes::ZERO, vms: true });
    for below in [UPPER, LOWER, None] {
        assert!(shell.offered("web", 1, below).unwrap_err().contains("is draining"));
    }
    shell.input(Input::Drain { on: false, stored: Bytes::ZERO, vms: true });
    assert_eq!(shell.offered("web", 1, UPPER), Ok(()));
}

#[test]
fn the_journal_tells_of_each_vm_that_comes_or_not() {
    let mut shell = host();
    let about = vec![Subject::Vm("web".parse().unwrap()), Subject::Host(name("b"))];
    let told = |shell: &Shell, what: &str| {
        assert_eq!(decisions(shell), [(what.to_owned(), about.clone())]);
    };
    shell.offered("web", 7, UPPER).unwrap_err();
    let why = "its cache may take 7GiB, and only 6GiB fit below T_upper, 8GiB";
    told(&shell, &format!("refuses VM web of b: {why}"));
    shell.offered("web", 1, LOWER).unwrap();
    let why = "its cache may take 1GiB, and 4GiB fit below T_lower, 6GiB";
    told(&shell, &format!("takes VM web from b: {why}"));
    told(shell.lose("web"), "does not take VM web of b: it lacks avx2");
}

proptest! {
    #[test]
    fn no_sequence_of_arrivals_overloads_a_host(
        vms in proptest::collection::vec((0_u8..6, 0_u64..5, any::<bool>(), any::<bool>()), 1..40)
    ) {
        let mut shell = host();
        let mut here = std::collections::BTreeMap::new();
        for (vm, gib, is_drain, comes) in vms {
            let vm = format!("vm{vm}");
            let below = if is_drain { UPPER } else { LOWER };
            if !here.contains_key(&vm) && shell.offered(&vm, gib, below).is_ok() {
                match comes {
                    true => drop(here.insert(vm, gib)),
                    false => drop(shell.lose(&vm)),
                }
            }
            let promised = here.values().sum::<u64>();
            prop_assert!(promised <= 6, "{promised} GiB above the 2 in use");
            prop_assert!(shell.node.room() <= Bytes::gib(6 - promised));
            // At most 40 s in all: until a minute is over, claims need no reading that shows them.
            shell.after(1).read(Readings { memory: memory(20), ..Readings::default() });
        }
    }
}
