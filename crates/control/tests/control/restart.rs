//! Tests of the decision when VMs with definitions start, by looks and by random looks.

use std::collections::BTreeMap;
use std::time::Duration;

use aquifer_control::restart::{
    End, FIRST_DELAY, LONGEST_DELAY, Look, MOST_STARTS, Policy, Restarts, SETTLED, Seen, Step,
};
use aquifer_page::RegionName;
use proptest::prelude::*;

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn name(number: usize) -> RegionName {
    format!("vm{number}").parse().unwrap()
}

fn look(policy: Policy, seen: Seen) -> Look {
    Look { policy, autostart: true, seen }
}

/// One VM and its machine, and whether the host drains.
#[derive(Default)]
struct One(Restarts, bool);

impl One {
    fn see(&mut self, now: u64, look: Look) -> Vec<Step> {
        let steps = self.0.step(seconds(now), &BTreeMap::from([(name(0), look)]), self.1);
        steps.into_iter().map(|(_, step)| step).collect()
    }

    fn fails(&mut self, now: u64) -> Vec<Step> {
        self.see(now, look(Policy::OnFailure, Seen::Ended(End::Failed)))
    }
}

#[test]
fn all_vms_start_at_boot_in_order_a_few_at_a_time() {
    let mut restarts = Restarts::default();
    let mut looks: BTreeMap<_, _> =
        (0..5).map(|number| (name(number), look(Policy::No, Seen::Never))).collect();
    let start = |from: usize| (from..from + 2).map(|n| (name(n), Step::Start)).collect::<Vec<_>>();
    assert_eq!(restarts.step(seconds(0), &looks, false), start(0));
    assert_eq!(restarts.step(seconds(1), &looks, false), []);
    assert_eq!(restarts.started(seconds(2), &name(0), true), None);
    assert_eq!(restarts.started(seconds(2), &name(1), false), Some(FIRST_DELAY));
    looks.insert(name(0), look(Policy::No, Seen::Runs));
    assert_eq!(restarts.step(seconds(2), &looks, false), start(2));
    for number in [2, 3] {
        restarts.started(seconds(3), &name(number), true);
    }
    for number in [2, 3] {
        looks.insert(name(number), look(Policy::No, Seen::Runs));
    }
    let both = [(name(1), Step::Start), (name(4), Step::Start)];
    assert_eq!(restarts.step(seconds(3), &looks, false), both);
}

#[test]
fn a_vm_without_autostart_waits_for_its_operator() {
    let mut vm = One::default();
    let off = Look { policy: Policy::Always, autostart: false, seen: Seen::Never };
    assert_eq!(vm.see(0, off), []);
    assert_eq!(vm.see(9, Look { autostart: true, ..off }), [], "'vm set' starts nothing");
    assert_eq!(vm.see(10, Look { seen: Seen::Runs, ..off }), []);
    let failed = Look { seen: Seen::Ended(End::Failed), ..off };
    assert_eq!(vm.see(11, failed), [Step::Wait(FIRST_DELAY)]);
    assert_eq!(vm.see(12, failed), [Step::Start]);
}

#[test]
fn each_failure_doubles_the_wait_until_the_vm_settles() {
    let mut vm = One::default();
    let mut now = 0;
    for delay in [1, 2, 4, 8, 16, 32, 60, 60] {
        vm.see(now, look(Policy::OnFailure, Seen::Runs));
        assert_eq!(vm.fails(now), [Step::Wait(seconds(delay))]);
        assert_eq!(vm.fails(now + delay - 1), []);
        now += delay;
        assert_eq!(vm.fails(now), [Step::Start]);
        assert_eq!(vm.fails(now + 5), [], "one start at a time");
        now += 5;
        assert_eq!(vm.0.started(seconds(now), &name(0), true), None);
    }
    now += SETTLED.as_secs() - 1;
    assert_eq!(vm.fails(now), [Step::Wait(LONGEST_DELAY)]);
    now += 60;
    assert_eq!(vm.fails(now), [Step::Start]);
    vm.0.started(seconds(now), &name(0), true);
    assert_eq!(vm.fails(now + SETTLED.as_secs()), [Step::Wait(FIRST_DELAY)]);
}

#[test]
fn the_policy_says_after_which_ends_a_vm_restarts() {
    let wait = vec![Step::Wait(FIRST_DELAY)];
    let rest = vec![Step::Rest];
    for (policy, end, steps) in [
        (Policy::OnFailure, End::Failed, &wait),
        (Policy::OnFailure, End::PoweredOff, &rest),
        (Policy::OnFailure, End::Ordered, &rest),
        (Policy::Always, End::Failed, &wait),
        (Policy::Always, End::PoweredOff, &wait),
        (Policy::Always, End::Ordered, &rest),
        (Policy::No, End::Failed, &rest),
        (Policy::No, End::PoweredOff, &rest),
        (Policy::No, End::Ordered, &rest),
    ] {
        // Also an agent that sees a VM for the first time after its end.
        for before in [None, Some(Seen::Runs)] {
            let mut vm = One::default();
            before.into_iter().for_each(|seen| _ = vm.see(0, look(policy, seen)));
            assert_eq!(vm.see(1, look(policy, Seen::Ended(end))), *steps, "{policy} {end:?}");
        }
    }
}

#[test]
fn a_stopped_vm_stays_off_also_while_it_waits() {
    let mut vm = One::default();
    vm.see(0, look(Policy::Always, Seen::Runs));
    assert_eq!(vm.fails(1), [Step::Wait(FIRST_DELAY)]);
    assert_eq!(vm.see(2, look(Policy::Always, Seen::Rests)), []);
    assert_eq!(vm.see(900, look(Policy::Always, Seen::Rests)), []);
    assert_eq!(vm.see(901, look(Policy::Always, Seen::Busy)), []);
    assert_eq!(vm.see(902, look(Policy::Always, Seen::Runs)), []);
    assert_eq!(vm.fails(903), [Step::Wait(FIRST_DELAY)], "the operator's start begins anew");
}

#[test]
fn a_failed_start_is_repeated_whatever_the_policy() {
    let mut vm = One::default();
    let never = look(Policy::No, Seen::Never);
    assert_eq!(vm.see(0, never), [Step::Start]);
    assert_eq!(vm.0.started(seconds(5), &name(0), false), Some(FIRST_DELAY));
    assert_eq!(vm.see(5, never), []);
    assert_eq!(vm.see(6, never), [Step::Start]);
    assert_eq!(vm.0.started(seconds(6), &name(0), false), Some(seconds(2)));
    // An operator removes the definition while the VM starts.
    assert_eq!(vm.see(8, never), [Step::Start]);
    assert_eq!(vm.0.step(seconds(9), &BTreeMap::new(), false), []);
    assert_eq!(vm.0.started(seconds(9), &name(0), false), Some(seconds(4)));
    assert_eq!(vm.0.step(seconds(99), &BTreeMap::new(), false), []);
}

#[test]
fn while_a_host_drains_no_vm_starts_for_the_first_time() {
    let never = look(Policy::OnFailure, Seen::Never);
    let mut vm = One(Restarts::default(), true);
    assert_eq!(vm.see(0, never), []);
    assert_eq!(vm.see(60, never), []);
    vm.1 = false;
    assert_eq!(vm.see(61, never), [Step::Start]);
    assert_eq!(vm.0.started(seconds(62), &name(0), false), Some(FIRST_DELAY));
    vm.1 = true;
    assert_eq!(vm.see(90, never), []);
    // A VM that runs here is to move, and for that it must run.
    vm.see(91, look(Policy::OnFailure, Seen::Runs));
    assert_eq!(vm.fails(92), [Step::Wait(seconds(2))]);
    assert_eq!(vm.fails(94), [Step::Start]);
}

#[test]
fn policies_are_read_as_they_are_written() {
    for policy in [Policy::OnFailure, Policy::Always, Policy::No] {
        assert_eq!(policy.to_string().parse(), Ok(policy));
        assert_eq!(serde_json::to_value(policy).unwrap(), policy.as_str());
    }
    let error = "never".parse::<Policy>().unwrap_err().to_string();
    assert!(error.contains("'never'") && error.contains("on-failure, always or no"), "{error}");
}

fn any_look() -> impl Strategy<Value = Look> {
    let policy = prop_oneof![Just(Policy::OnFailure), Just(Policy::Always), Just(Policy::No)];
    let seen = prop_oneof![
        1 => Just(Seen::Runs),
        1 => Just(Seen::Busy),
        1 => Just(Seen::Rests),
        1 => Just(Seen::Never),
        1 => Just(Seen::Ended(End::Ordered)),
        1 => Just(Seen::Ended(End::PoweredOff)),
        4 => Just(Seen::Ended(End::Failed)),
    ];
    (policy, any::<bool>(), seen).prop_map(|(policy, autostart, seen)| Look {
        policy,
        autostart,
        seen,
    })
}

proptest! {
    #![proptest_config(crate::cases(256))]

    #[test]
    fn no_vm_starts_twice_or_too_soon_or_against_an_order(
        rounds in prop::collection::vec(
            (1..90u64, prop::collection::vec(prop::option::weighted(0.9, any_look()), 4),
             prop::collection::vec((any::<bool>(), any::<bool>()), 4)),
            1..60,
        ),
    ) {
        let mut restarts = Restarts::default();
        let (mut now, mut open) = (Duration::ZERO, Vec::new());
        let mut not_before = BTreeMap::new();
        for (passes, looks, outcomes) in rounds {
            now += seconds(passes);
            let looks: BTreeMap<_, _> = looks.into_iter().enumerate()
                .filter_map(|(number, look)| Some((name(number), look?))).collect();
            for (vm, step) in restarts.step(now, &looks, false) {
                let Look { policy, seen, .. } = looks[&vm];
                match step {
                    Step::Start => {
                        prop_assert!(matches!(seen, Seen::Never | Seen::Ended(_)), "{seen:?}");
                        prop_assert!(!open.contains(&vm));
                        let earliest = not_before.get(&vm).copied().unwrap_or_default();
                        prop_assert!(now >= earliest, "{now:?} {earliest:?}");
                        open.push(vm);
                    }
                    Step::Wait(delay) => {
                        prop_assert!((FIRST_DELAY..=LONGEST_DELAY).contains(&delay));
                        prop_assert!(policy != Policy::No && seen != Seen::Ended(End::Ordered));
                        not_before.insert(vm, now + delay);
                    }
                    Step::Rest => prop_assert!(matches!(seen, Seen::Ended(_) | Seen::Never)),
                }
            }
            prop_assert!(open.len() <= MOST_STARTS);
            for (number, (ends, runs)) in outcomes.into_iter().enumerate() {
                let vm = name(number);
                if !ends || !open.contains(&vm) {
                    continue;
                }
                open.retain(|one| *one != vm);
                let wait = restarts.started(now, &vm, runs);
                prop_assert_eq!(wait.is_some(), !runs);
                not_before.extend(wait.map(|wait| (vm, now + wait)));
            }
            not_before.retain(|vm, _| looks.contains_key(vm) || open.contains(vm));
        }
    }
}
