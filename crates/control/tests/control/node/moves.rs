//! Tests of VMs that move away: by the operator's drain, and from sustained overload.

use std::time::Duration;

use aquifer_control::ledger::{OwnMemory, RegionMemory};
use aquifer_control::node::{
    Input, MoveEnd, MoveState, Obstacle, Output, Readings, Threshold, VmReading,
};
use aquifer_control::{Config, Restored, Subject};
use aquifer_page::{Bytes, Group, RegionName};
use proptest::prelude::*;

use super::{Shell, memory};
use crate::host::{config, name};

fn vm(name: &str) -> RegionName {
    name.parse().unwrap()
}

/// A VM with this many MiB to copy.
fn free(name: &str, dirty: u64) -> VmReading {
    VmReading { vm: vm(name), obstacle: None, dirty: Bytes::mib(dirty), arrived: None }
}

fn kept(name: &str, obstacle: Obstacle) -> VmReading {
    VmReading { obstacle: Some(obstacle), ..free(name, 0) }
}

/// Caches of these VMs, in MiB.
pub(super) fn own(vms: &[(&str, u64)]) -> OwnMemory {
    let region = |(name, mib): &(&str, u64)| RegionMemory {
        name: vm(name),
        group: Group::default(),
        size: Bytes::gib(1),
        vm_size: None,
        cache: Bytes::mib(*mib),
        resident: Bytes::mib(*mib),
        shared: Bytes::ZERO,
        auto: None,
        spilled: None,
    };
    OwnMemory { regions: vms.iter().map(region).collect(), ..OwnMemory::default() }
}

impl Shell {
    fn vacate(&mut self, on: bool) -> &mut Self {
        self.input(Input::Drain { on, stored: Bytes::ZERO, vms: true })
    }

    fn see(&mut self, vms: &[VmReading]) -> &mut Self {
        self.input(Input::Vms(vms.to_vec()))
    }

    /// Lets a period end with this use in percent, and these caches in MiB.
    fn loaded(&mut self, used: u64, vms: &[(&str, u64)]) -> &mut Self {
        self.read(Readings { memory: memory(used), own: own(vms), ..Readings::default() })
    }

    fn looks(&self) -> bool {
        self.outputs.contains(&Output::LookAtVms)
    }

    /// Returns the VM whose move has just begun, and the host that it must not go to.
    fn moves(&self) -> Option<(String, Option<String>)> {
        let mut moves = self.outputs.iter().filter_map(|output| match output {
            Output::MoveVm { vm, avoid, .. } => {
                Some((vm.to_string(), avoid.as_ref().map(ToString::to_string)))
            }
            _ => None,
        });
        let first = moves.next();
        assert_eq!(moves.next(), None, "one move at a time");
        first
    }

    /// Returns up to where the destination may use its memory.
    fn below(&self) -> Option<Threshold> {
        self.outputs.iter().find_map(|output| match output {
            Output::MoveVm { below, .. } => Some(*below),
            _ => None,
        })
    }

    fn moves_vm(&self) -> Option<String> {
        self.moves().map(|(vm, _)| vm)
    }

    fn ends(&mut self, name: &str, end: MoveEnd) -> &mut Self {
        self.input(Input::MoveEnded { vm: vm(name), end })
    }

    /// Returns the decisions about a VM.
    fn about(&self, name: &str) -> Vec<String> {
        let subject = Subject::Vm(vm(name));
        let decisions = self.outputs.iter().filter_map(|output| match output {
            Output::Decision { what, about, .. } if about.contains(&subject) => Some(what.clone()),
            _ => None,
        });
        decisions.collect()
    }
}

fn moved(to: &str) -> MoveEnd {
    MoveEnd::Moved { to: name(to), sent: Bytes::mib(9), why: "8GiB fit there".to_owned() }
}

fn failed(to: Option<&str>) -> MoveEnd {
    MoveEnd::Failed { to: to.map(name), why: "the link is down".to_owned() }
}

fn refused() -> MoveEnd {
    MoveEnd::Refused { why: "b: full".to_owned() }
}

#[test]
fn a_drain_moves_each_vm_that_can_move_one_at_a_time() {
    let mut shell = Shell::new();
    assert!(!shell.period(20).looks(), "an idle host looks at no VM");
    assert!(shell.vacate(true).looks() && shell.node.vacates());
    assert_eq!(shell.node.room(), Bytes::ZERO);
    let stays = kept("local", Obstacle::LocalMemory);
    let all = [free("large", 90), free("small", 5), stays.clone()];
    assert_eq!(shell.see(&all).moves_vm().as_deref(), Some("small"), "the least to copy");
    assert_eq!(shell.below(), Some(Threshold::Upper));
    let why = "moves VM small to another host: this host is draining; 5MiB of it is dirty. \
               The others: large has 90MiB, and failed 0 times; local stays: its memory is no \
               region: it has '--cache none' or huge pages";
    assert_eq!(shell.about("small"), [why]);
    assert_eq!(shell.node.move_states()[&vm("small")], MoveState::Moves);
    assert!(!shell.period(20).looks() && shell.see(&all).moves().is_none(), "one at a time");

    assert!(shell.ends("small", moved("b")).looks());
    assert_eq!(shell.about("small"), ["moved VM small to b; 9MiB was sent; 8GiB fit there"]);
    assert_eq!(shell.see(&[free("large", 90), stays.clone()]).moves_vm().as_deref(), Some("large"));
    shell.ends("large", moved("b"));
    assert_eq!(shell.see(&[stays]).moves(), None);
    assert!(shell.node.move_states().is_empty());
}

#[test]
fn a_failed_move_goes_to_another_host_and_backs_off() {
    let mut shell = Shell::new();
    let one = [free("web", 1)];
    shell.vacate(true).see(&one);
    let mut waits = Vec::new();
    for _ in 0..4 {
        shell.ends("web", failed(Some("b"))).see(&one);
        assert_eq!(shell.moves(), None, "too soon");
        let failed = MoveState::Failed("the link is down".to_owned());
        assert_eq!(shell.node.move_states()[&vm("web")], failed);
        let mut waited = 0;
        while shell.period(20).see(&one).moves().is_none() {
            waited += 1;
            assert!(waited < 20);
        }
        assert_eq!(shell.moves(), Some(("web".to_owned(), Some("b".to_owned()))));
        waits.push(waited + 1);
    }
    assert_eq!(waits, [1, 2, 4, 8]);

    // No other host takes it, so that the one that failed may be asked again.
    shell.ends("web", refused());
    assert_eq!(shell.node.move_states()[&vm("web")], MoveState::Refused("b: full".to_owned()));
    assert_eq!(shell.period(20).see(&one).moves(), None);
    assert_eq!(shell.after(60).see(&one).moves(), Some(("web".to_owned(), None)));

    // The order that comes again is a new chance at once.
    shell.ends("web", refused());
    assert_eq!(shell.period(20).see(&one).moves(), None);
    shell.vacate(true);
    assert_eq!(shell.after(1).period(20).see(&one).moves(), Some(("web".to_owned(), None)));
}

#[test]
fn a_vm_that_no_host_takes_holds_up_no_other() {
    let mut shell = Shell::new();
    let both = [free("picky", 1), free("web", 2)];
    shell.vacate(true).see(&both).ends("picky", refused());
    assert_eq!(shell.after(30).see(&both).moves_vm().as_deref(), Some("web"));
}

#[test]
fn the_end_of_a_drain_cancels_its_move_and_starts_no_other() {
    let mut shell = Shell::new();
    shell.period(20).vacate(true).see(&[free("web", 1), free("db", 2)]);
    assert!(shell.vacate(false).outputs.contains(&Output::CancelMove));
    assert!(!shell.node.vacates() && shell.node.room() > Bytes::ZERO);
    shell.ends("web", MoveEnd::Cancelled);
    assert_eq!(shell.about("web"), ["cancelled the move of VM web, which stays"]);
    assert!(!shell.looks() && !shell.period(20).looks());
    assert_eq!(shell.see(&[free("web", 1)]).moves(), None, "the look was under way");
    assert!(shell.vacate(false).outputs.is_empty());
}

#[test]
fn a_late_or_repeated_end_of_a_move_changes_nothing() {
    let mut shell = Shell::new();
    let both = [free("web", 1), free("db", 2)];
    shell.vacate(true).see(&both).ends("web", moved("b")).see(&both[1..]);
    assert!(shell.ends("web", failed(None)).outputs.is_empty());
    assert!(shell.see(&both).moves().is_none(), "db still moves");
}

#[test]
fn an_agent_that_stops_moves_no_vm() {
    let mut shell = Shell::new();
    assert!(!shell.drain(true).looks() && shell.node.is_draining() && !shell.node.vacates());
    assert_eq!(shell.see(&[free("web", 1)]).moves(), None);
}

#[test]
fn a_host_that_does_not_lend_drains_its_vms_all_the_same() {
    let mut shell = Shell::with(Restored::default(), Config { lends: false, ..config() });
    assert!(!shell.node.vacates() && shell.period(20).node.room() > Bytes::ZERO);
    shell.vacate(true).see(&[free("web", 1)]);
    assert_eq!(shell.moves_vm().as_deref(), Some("web"));
    shell.vacate(false);
    assert!(shell.node.is_draining(), "its configuration lends nothing");
}

const CACHES: [(&str, u64); 2] = [("large", 4096), ("small", 1024)];

/// Overloads a host for six minutes; returns its first move, with VMs `vms`.
fn overload(shell: &mut Shell, vms: &[VmReading]) -> Option<String> {
    for _ in 0..360 {
        shell.after(1).loaded(95, &CACHES);
        if shell.looks()
            && let Some(vm) = shell.see(vms).moves_vm()
        {
            return Some(vm);
        }
    }
    None
}

#[test]
fn a_vm_leaves_after_five_minutes_of_overload() {
    let mut shell = Shell::with(Restored::default(), Config { borrows: false, ..config() });
    let vms = [free("large", 40), free("small", 20), kept("local", Obstacle::LocalMemory)];
    let began = shell.now;
    assert_eq!(overload(&mut shell, &vms).as_deref(), Some("large"));
    let lasted = (shell.now - began).as_secs();
    assert!((300..=306).contains(&lasted), "{lasted}");
    assert_eq!(shell.below(), Some(Threshold::Lower));
    let [why] = &shell.about("large")[..] else { panic!("{:?}", shell.outputs) };
    for part in [
        "overloaded for 300s",
        "this host may not borrow",
        "large frees 4GiB and has 40MiB to copy",
        "small frees 1GiB and has 20MiB to copy",
        "local stays: its memory is no region",
    ] {
        assert!(why.contains(part), "no '{part}' in {why}");
    }
}

#[test]
fn overload_that_ends_in_time_moves_nothing() {
    let mut shell = Shell::with(Restored::default(), Config { borrows: false, ..config() });
    let vms = [free("large", 40), free("small", 20)];
    for round in 0..20 {
        for second in 0..360 {
            shell.after(1).loaded(if second < 299 { 95 } else { 70 }, &CACHES);
            assert!(!shell.looks(), "round {round}, second {second}");
        }
    }
    assert_eq!(shell.see(&vms).moves(), None);
}

#[test]
fn a_lender_recalls_its_leases_before_a_vm_moves() {
    let mut shell = Shell::new();
    shell.lend("b", 1);
    assert_eq!(overload(&mut shell, &[free("large", 1)]), None);
}

#[test]
fn vms_that_came_or_move_stay_and_the_next_one_waits() {
    let mut shell = Shell::with(Restored::default(), Config { borrows: false, ..config() });
    let fresh =
        |seconds| VmReading { arrived: Some(Duration::from_secs(seconds)), ..free("large", 1) };
    assert_eq!(overload(&mut shell, &[fresh(599)]), None);
    let comes = kept("new", Obstacle::Arrives(name("b")));
    assert_eq!(overload(&mut shell, &[free("large", 1), comes]), None, "a move is in progress");
    assert_eq!(overload(&mut shell, &[fresh(600)]).as_deref(), Some("large"));
    shell.ends("large", moved("b"));
    let began = shell.now;
    assert_eq!(overload(&mut shell, &[free("small", 1)]).as_deref(), Some("small"));
    assert!(shell.now - began >= Duration::from_secs(300), "{:?}", shell.now - began);
}

#[test]
fn no_vm_moves_by_overload_if_the_configuration_says_never() {
    let config = Config { borrows: false, ..config() };
    let mut shell = Shell::that_moves(Restored::default(), config, None);
    assert_eq!(overload(&mut shell, &[free("large", 1)]), None);
    assert!(!shell.looks());
}

/// A step of a random run of three hosts.
#[derive(Clone, Debug)]
enum Step {
    /// Seconds pass with this use of memory on each host.
    Time(u64, [u64; 3]),
    /// The agent of a host starts again, also in the middle of a move.
    Restart(usize),
    /// The move in progress on a host fails.
    Fail(usize),
    /// The drain of a host begins or ends.
    Drain(usize, bool),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let used = || prop_oneof![Just(50_u64), Just(95)];
    let step = prop_oneof![
        6 => (1_u64..300, [used(), used(), used()]).prop_map(|(time, used)| Step::Time(time, used)),
        1 => (0..3_usize).prop_map(Step::Restart),
        1 => (0..3_usize).prop_map(Step::Fail),
        1 => (0..3_usize, any::<bool>()).prop_map(|(host, on)| Step::Drain(host, on)),
    ];
    proptest::collection::vec(step, 1..25)
}

/// A VM of a random run, by its records.
#[derive(Debug)]
struct Vm {
    name: String,
    host: usize,
    arrived: Option<Duration>,
}

/// Three hosts and their VMs: the hosts' agents may start again, and the VMs' records stay.
struct Cluster {
    now: Duration,
    shells: Vec<Shell>,
    vms: Vec<Vm>,
    /// The move in progress on each host: the VM, and whether the host drained when it began.
    moves: [Option<(usize, bool)>; 3],
}

const HOSTS: [&str; 3] = ["b", "c", "d"];

fn shell() -> Shell {
    Shell::with(Restored::default(), Config { borrows: false, ..config() })
}

impl Cluster {
    fn new() -> Self {
        let vm =
            |number: usize| Vm { name: format!("vm{number}"), host: number % 3, arrived: None };
        let shells = HOSTS.iter().map(|_| shell()).collect();
        Self { now: Duration::ZERO, shells, vms: (0..6).map(vm).collect(), moves: [None; 3] }
    }

    fn here(&self, host: usize) -> Vec<VmReading> {
        let here = self.vms.iter().filter(|vm| vm.host == host);
        let reading = |vm: &Vm| VmReading {
            arrived: vm.arrived.map(|at| self.now - at),
            ..free(&vm.name, 1)
        };
        here.map(reading).collect()
    }

    fn second(&mut self, used: [u64; 3]) -> Result<(), TestCaseError> {
        self.now += Duration::from_secs(1);
        for (host, used) in used.into_iter().enumerate() {
            let here = self.here(host);
            let caches: Vec<_> = here.iter().map(|vm| (vm.vm.to_string(), 2048)).collect();
            let caches: Vec<_> = caches.iter().map(|(name, mib)| (name.as_str(), *mib)).collect();
            self.shells[host].after(1).loaded(used, &caches);
            self.ends_looks(host)?;
        }
        Ok(())
    }

    /// Answers looks, and notes the move that begins.
    fn ends_looks(&mut self, host: usize) -> Result<(), TestCaseError> {
        let drains = self.shells[host].node.vacates();
        while self.shells[host].looks() {
            let here = self.here(host);
            self.shells[host].see(&here);
        }
        let Some(name) = self.shells[host].moves_vm() else { return Ok(()) };
        prop_assert!(self.moves[host].is_none(), "two moves of {}", HOSTS[host]);
        let number = self.vms.iter().position(|vm| vm.name == name);
        let number = number.ok_or_else(|| TestCaseError::fail("an unknown VM moves"))?;
        let vm = &self.vms[number];
        prop_assert_eq!(vm.host, host, "another host's VM moves");
        let rests = vm.arrived.is_none_or(|at| self.now - at >= Duration::from_secs(600));
        prop_assert!(drains || rests, "{vm:?} moves twice in ten minutes");
        self.moves[host] = Some((number, drains));
        Ok(())
    }

    /// Ends the move of a host: the VM goes to the next host, if that does not drain.
    fn end_move(&mut self, host: usize, fails: bool) -> Result<(), TestCaseError> {
        let Some((number, _)) = self.moves[host].take() else { return Ok(()) };
        let to = (host + 1) % 3;
        let vm = &mut self.vms[number];
        let end = if fails {
            failed(Some(HOSTS[to]))
        } else if self.shells[to].node.vacates() {
            refused()
        } else {
            (vm.host, vm.arrived) = (to, Some(self.now));
            moved(HOSTS[to])
        };
        let name = vm.name.clone();
        self.shells[host].ends(&name, end);
        self.ends_looks(host)
    }

    fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match step {
            Step::Time(seconds, used) => {
                for second in 0..*seconds {
                    self.second(*used)?;
                    // A move takes some seconds.
                    for host in 0..3 {
                        if second % 7 == 6 {
                            self.end_move(host, false)?;
                        }
                    }
                }
            }
            // The supervisor of the VM cancels the move, or has completed it: its record tells.
            Step::Restart(host) => {
                self.moves[*host] = None;
                let drains = self.shells[*host].node.vacates();
                self.shells[*host] = shell();
                if drains {
                    self.shells[*host].vacate(true);
                    self.ends_looks(*host)?;
                }
            }
            Step::Fail(host) => self.end_move(*host, true)?,
            Step::Drain(host, on) => {
                self.shells[*host].vacate(*on);
                self.ends_looks(*host)?;
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn no_vm_moves_twice_in_ten_minutes_nor_beside_another(steps in steps()) {
        let mut cluster = Cluster::new();
        for step in &steps {
            cluster.step(step)?;
        }
    }

    #[test]
    fn a_load_that_swings_moves_no_vm_to_and_fro(high in 1_u64..900, low in 1_u64..900) {
        let mut cluster = Cluster::new();
        let mut homes: Vec<Vec<usize>> = cluster.vms.iter().map(|vm| vec![vm.host]).collect();
        // Two hours, in which one host after the other is overloaded.
        let turns = 7200 / (high + low);
        for turn in 0..turns {
            let mut used = [50; 3];
            used[turn as usize % 3] = 95;
            cluster.step(&Step::Time(high, used))?;
            cluster.step(&Step::Time(low, [50; 3]))?;
            for (homes, vm) in homes.iter_mut().zip(&cluster.vms) {
                if homes.last() != Some(&vm.host) {
                    homes.push(vm.host);
                }
            }
        }
        let most = if high < 300 { 0 } else { 12 };
        for homes in homes {
            prop_assert!(homes.len() <= most + 1, "{homes:?}");
        }
    }
}
