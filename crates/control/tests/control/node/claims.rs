//! Tests of claims: memory that a VM, a region or an export is about to get is promised once, and
//! no longer than it must be.

use aquifer_control::ledger::{Claim, ExportMemory, OwnMemory, Purpose, RegionMemory, VmMemory};
use aquifer_control::node::{Answer, Input, Readings};
use aquifer_control::{Config, Message, Restored, Shareable, Subject};
use aquifer_page::{Bytes, Group};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::ledger::decisions;
use super::{Shell, memory};
use crate::cases;
use crate::host::{config, req};

fn claim(purpose: Purpose, name: &str, bytes: Bytes) -> Claim {
    let name = name.parse().unwrap();
    Claim { name, purpose, group: Group::default(), bytes, reserve: Bytes::ZERO }
}

fn vm(name: &str, gib: u64) -> Claim {
    claim(Purpose::Vm, name, Bytes::gib(gib))
}

fn cache(name: &str, gib: u64) -> Claim {
    claim(Purpose::Cache, name, Bytes::gib(gib))
}

/// Returns what a reading shows once these have their memory, none of it used yet.
fn shown(claims: &[Claim]) -> OwnMemory {
    let mut own = OwnMemory::default();
    for Claim { name, purpose, group, bytes, reserve } in claims.iter().cloned() {
        let none = Bytes::ZERO;
        match purpose {
            Purpose::Vm => {
                let size = bytes;
                own.vms.push(VmMemory { name, floor: none, size, reserve, resident: none });
            }
            Purpose::Cache => {
                let (size, cache) = (bytes, bytes);
                let region = RegionMemory {
                    name,
                    group,
                    size,
                    vm_size: None,
                    cache,
                    resident: none,
                    shared: none,
                    auto: None,
                    spilled: None,
                };
                own.regions.push(region);
            }
            Purpose::Export => {
                own.exports.push(ExportMemory { name, capacity: bytes, stored: none });
            }
        }
    }
    own
}

impl Shell {
    fn claims(&mut self, claim: &Claim, overcommit: bool) -> bool {
        let (claim, ticket) = (claim.clone(), self.ticket());
        self.input(Input::Claim { claim, overcommit, ticket });
        match self.answer() {
            Answer::Claimed => true,
            Answer::Failed(_) => false,
            other => panic!("{other:?}"),
        }
    }

    fn asks_for(&mut self, claim: &Claim) -> bool {
        self.claims(claim, false)
    }

    /// Reads the host again, some seconds later.
    fn shows(&mut self, seconds: u64, claims: &[Claim]) -> &mut Self {
        let own = shown(claims);
        self.after(seconds).read(Readings { memory: memory(20), own, ..Readings::default() })
    }
}

#[test]
fn a_refusal_leaves_the_former_claim_of_that_name() {
    let mut shell = Shell::new();
    shell.period(20);
    assert!(shell.asks_for(&cache("items", 5)));
    assert!(!shell.asks_for(&cache("items", 50)));
    assert!(!shell.asks_for(&cache("more", 4)), "5 of the 8 GiB are promised");
    assert!(shell.asks_for(&cache("more", 3)));
}

#[test]
fn two_that_ask_at_once_do_not_get_the_same_memory() {
    let mut shell = Shell::new();
    shell.period(20);
    // 2 of 10 GiB are used.
    assert!(shell.asks_for(&vm("one", 5)));
    assert!(!shell.asks_for(&vm("two", 4)), "3 GiB are left");
    let why = "it takes 4GiB of this host's RAM, and 3GiB are left for it (0B are lent, 0B of them \
               recallable; other VMs could give up 5GiB)";
    assert_eq!(shell.failure(), why);
    let subject = Subject::Vm("two".parse().unwrap());
    assert_eq!(decisions(&shell), [(format!("refuses memory to two: {why}"), vec![subject])]);
    assert!(shell.asks_for(&cache("two", 3)), "a smaller one fits");
    assert!(!shell.asks_for(&cache("three", 1)));
    assert_eq!(shell.node.ledger().free, Bytes::ZERO);
    assert_eq!(shell.node.controller().spare(), Bytes::ZERO, "a claim is not lent");
}

#[test]
fn a_vm_in_a_region_grows_by_one_claim_that_its_reading_ends() {
    let mut shell = Shell::new();
    let region = |gib| {
        let mut own = shown(&[cache("one", 8)]);
        own.regions[0].vm_size = Some(Bytes::gib(gib));
        own
    };
    let reads = |shell: &mut Shell, seconds, gib| {
        let own = region(gib);
        shell.after(seconds).read(Readings { memory: memory(20), own, ..Readings::default() });
    };
    reads(&mut shell, 1, 2);
    assert_eq!(shell.node.ledger().free, Bytes::gib(6), "it has 2 of 8 GiB");
    assert!(shell.asks_for(&vm("one", 5)));
    assert!(shell.asks_for(&vm("one", 5)), "the command asks twice");
    assert_eq!(shell.node.ledger().free, Bytes::gib(3));
    assert!(!shell.asks_for(&vm("two", 4)), "3 GiB are left");
    reads(&mut shell, 1, 2);
    assert_eq!(shell.node.ledger().free, Bytes::gib(3), "the VM still grows");
    for _ in 0..6 {
        reads(&mut shell, 1, 5);
    }
    // The reading has shown the size, so a smaller one counts now.
    reads(&mut shell, 1, 3);
    assert_eq!(shell.node.ledger().free, Bytes::gib(5));
}

#[test]
fn a_claim_that_comes_twice_counts_once() {
    let mut shell = Shell::new();
    shell.period(20);
    for _ in 0..3 {
        assert!(shell.asks_for(&vm("one", 5)));
        assert_eq!(shell.node.ledger().free, Bytes::gib(3));
    }
    assert!(shell.asks_for(&vm("one", 8)), "the command asks again with another size");
    assert!(shell.asks_for(&vm("one", 2)));
    assert_eq!(shell.node.ledger().free, Bytes::gib(6));
}

#[test]
fn a_claim_counts_until_a_reading_shows_it() {
    let mut shell = Shell::new();
    shell.period(20).period(20);
    assert!(shell.asks_for(&vm("one", 5)));
    shell.shows(59, &[]);
    assert_eq!(shell.node.ledger().free, Bytes::gib(3));
    // The VM has its memory, and counts once.
    shell.shows(0, &[vm("one", 5)]);
    assert_eq!(shell.node.ledger().free, Bytes::gib(3));
    shell.shows(1, &[]);
    assert_eq!(shell.node.ledger().free, Bytes::gib(8), "the VM has ended");
}

#[test]
fn the_claim_of_a_dead_command_ends() {
    let mut shell = Shell::new();
    shell.period(20);
    assert!(shell.asks_for(&vm("one", 8)));
    shell.shows(30, &[]);
    assert!(!shell.asks_for(&vm("two", 1)));
    shell.shows(30, &[]);
    assert!(shell.asks_for(&vm("two", 8)));
    // A command that fails says so.
    assert!(shell.asks_for(&vm("two", 0)));
    assert_eq!(shell.node.ledger().free, Bytes::gib(8));
}

#[test]
fn an_old_reading_of_a_former_vm_settles_no_claim() {
    let mut shell = Shell::new();
    shell.shows(1, &[vm("one", 5)]);
    assert!(shell.asks_for(&vm("one", 5)), "it needs no more than it has");
    shell.shows(1, &[vm("one", 5)]).shows(1, &[]);
    assert_eq!(shell.node.ledger().free, Bytes::gib(3));
    shell.shows(5, &[]);
    assert_eq!(shell.node.ledger().free, Bytes::gib(8), "no claim outlives what it was for");
}

#[test]
fn only_growth_needs_room() {
    let mut shell = Shell::new();
    shell.shows(1, &[vm("one", 6)]);
    assert!(shell.asks_for(&vm("one", 7)));
    assert!(!shell.asks_for(&vm("one", 9)));
    assert!(shell.failure().starts_with("it takes 3GiB of this host's RAM, and 2GiB are left"));
    assert!(shell.asks_for(&vm("one", 3)), "it shrinks");
    assert_eq!(shell.node.ledger().free, Bytes::gib(2), "and has 6 GiB until then");
}

#[test]
fn lent_memory_is_named_with_the_way_to_get_it_back() {
    let mut shell = Shell::new();
    shell.lend("b", 1);
    assert!(!shell.asks_for(&vm("one", 8)));
    let Answer::Failed(problem) = shell.answer() else { panic!("{:?}", shell.answer()) };
    assert!(problem.error.contains("1GiB are lent, 1GiB of them recallable"), "{problem:?}");
    let help = problem.help.unwrap();
    for way in ["smaller", "host drain", "--overcommit"] {
        assert!(help.contains(way), "{help}");
    }
    assert!(shell.claims(&vm("one", 8), true), "the operator insists");
    assert_eq!(shell.node.ledger().overcommitted, Bytes::gib(1));
    assert!(shell.asks_for(&vm("one", 0)));
    assert!(shell.asks_for(&vm("one", 7)));
}

#[test]
fn what_a_host_keeps_for_itself_is_for_its_vms_too() {
    let reserved = Shareable::Preconfigured { reserved: Bytes::gib(6) };
    let mut shell = Shell::with(Restored::default(), Config { shareable: reserved, ..config() });
    shell.period(20);
    // 2 GiB are used by programs, and 6 GiB are for them and for VMs.
    assert_eq!(shell.node.ledger().free, Bytes::gib(4));
    assert_eq!(shell.node.room(), Bytes::gib(6), "T_upper limits it");
    assert!(shell.asks_for(&vm("one", 4)), "each byte counts once");
    assert_eq!(shell.node.ledger().free, Bytes::gib(4), "it all fits into what is reserved");
    assert!(shell.asks_for(&cache("two", 4)));
    assert_eq!((shell.node.ledger().free, shell.node.ledger().reserved.0 >> 30), (Bytes::ZERO, 2));
    assert!(!shell.asks_for(&cache("three", 1)));
}

#[test]
fn an_agent_that_has_read_nothing_yet_promises_nothing() {
    let mut shell = Shell::new();
    assert!(!shell.asks_for(&vm("one", 1)));
    assert!(shell.failure().contains("only just started"), "{}", shell.failure());
}

#[derive(Clone, Debug)]
enum Happening {
    Claim {
        number: u8,
        purpose: Purpose,
        mib: u64,
    },
    /// Those of the accepted claims whose bit is set show in the next reading.
    Reading {
        seconds: u64,
        which: u16,
    },
    Request {
        number: u128,
        gib: u64,
    },
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        3 => (0..8_u8, select(vec![Purpose::Vm, Purpose::Cache, Purpose::Export]), 0..6000_u64)
            .prop_map(|(number, purpose, mib)| Happening::Claim { number, purpose, mib }),
        2 => (0..4_u64, any::<u16>())
            .prop_map(|(seconds, which)| Happening::Reading { seconds, which }),
        1 => (0..99_u128, 1..4_u64).prop_map(|(number, gib)| Happening::Request { number, gib }),
    ]
}

proptest! {
    #![proptest_config(cases(256))]

    /// Commands make VMs, regions and exports when their claims are accepted, sooner or later; and
    /// the host lends. The time is too short for a claim to end by itself.
    #[test]
    fn nothing_is_promised_twice(happenings in vec(happening(), 1..15)) {
        let mut shell = Shell::new();
        shell.shows(1, &[]);
        let mut accepted: Vec<Claim> = Vec::new();
        let mut present: Vec<Claim> = Vec::new();
        for happening in happenings {
            match happening {
                Happening::Claim { number, purpose, mib } => {
                    let claim = claim(purpose, &format!("n{number}"), Bytes::mib(mib));
                    let same = |other: &Claim| {
                        (other.purpose, &other.name) == (claim.purpose, &claim.name)
                    };
                    // Nothing has two commands at a time, and shrinking is another matter.
                    if !accepted.iter().any(same) && mib > 0 && shell.asks_for(&claim) {
                        accepted.push(claim);
                    }
                }
                Happening::Reading { seconds, which } => {
                    let shows = |(bit, _): &(usize, &Claim)| which & (1 << (bit % 16)) != 0;
                    for (_, claim) in accepted.iter().enumerate().filter(shows) {
                        if !present.contains(claim) {
                            present.push(claim.clone());
                        }
                    }
                    shell.shows(seconds, &present);
                }
                Happening::Request { number, gib } => {
                    shell.hear("b", req(number, Bytes::gib(gib)));
                }
            }
            let ledger = shell.node.ledger();
            prop_assert_eq!(ledger.overcommitted, Bytes::ZERO, "{:?}", ledger);
            let exports = |claim: &&Claim| claim.purpose == Purpose::Export;
            let sum = |is_export| -> Bytes {
                let meant = accepted.iter().filter(|claim| exports(claim) == is_export);
                meant.map(|claim| claim.bytes).sum()
            };
            prop_assert_eq!(ledger.local(), sum(false), "{:?}", ledger);
            prop_assert!(ledger.lent >= sum(true), "{:?}", ledger);
        }
    }
}

#[test]
fn an_export_gets_what_is_free_and_counts_as_lent() {
    let mut shell = Shell::new();
    shell.shows(1, &[vm("one", 5)]);
    let export = |gib| claim(Purpose::Export, "export-7", Bytes::gib(gib));
    assert!(!shell.asks_for(&export(4)));
    assert!(shell.failure().starts_with("it takes 4GiB of this host's RAM, and 3GiB are left"));
    assert!(shell.asks_for(&export(3)));
    assert_eq!((shell.node.ledger().lent, shell.node.ledger().free), (Bytes::gib(3), Bytes::ZERO));
    assert!(!shell.asks_for(&cache("two", 1)));
    shell.shows(1, &[vm("one", 5), export(3)]);
    assert_eq!(shell.node.ledger().lent, Bytes::gib(3), "it counts once");
    shell.shows(5, &[vm("one", 5)]);
    assert_eq!(shell.node.ledger().lent, Bytes::ZERO, "it has ended");
}

#[test]
fn a_claim_is_not_lent_while_it_waits() {
    let mut shell = Shell::new();
    shell.period(20);
    assert!(shell.asks_for(&cache("one", 7)));
    shell.hear("b", req(1, Bytes::gib(2)));
    assert!(matches!(shell.sent()[..], [(_, Message::MemBorRej { .. })]), "{:?}", shell.sent());
}
