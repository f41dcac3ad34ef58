//! Tests of the reprovisioner by sequences of periods: which VM gets, which gives, and when none
//! moves.

use aquifer_control::group::reprovision::{Plan, Policy, Why};

use crate::tenant::{Guest, Tenant, said};

const ALL: [Policy; 3] = [Policy::Demand, Policy::Fair, Policy::Entitlement];

fn why(plan: &Plan, vm: &str) -> Why {
    plan.decisions.iter().find(|decision| decision.vm.as_str() == vm).expect("each VM has one").why
}

#[test]
fn by_demand_a_swapping_vm_gets_a_step_each_period() {
    let mut tenant =
        Tenant::new(Policy::Demand, 500, [("a", Guest::new(540)), ("b", Guest::new(300))]);
    let plan = tenant.period();
    assert_eq!(said(&plan), ["a +10"]);
    assert!(matches!(why(&plan, "a"), Why::Swaps { .. }) && why(&plan, "b") == Why::Stays);
    assert_eq!(tenant.periods(100), ["a +10", "a +10"]);
    assert_eq!(tenant.extras(), [30, 0]);
}

#[test]
fn by_demand_the_vm_that_swaps_most_gets_first() {
    let vms = [("a", Guest::new(600)), ("b", Guest::new(700)), ("c", Guest::new(650))];
    let mut tenant = Tenant::new(Policy::Demand, 30, vms);
    // The cache keeps a step, so there are two.
    let plan = tenant.period();
    assert_eq!(said(&plan), ["b +10", "c +10"]);
    assert!(matches!(why(&plan, "a"), Why::Short { .. }), "{:?}", why(&plan, "a"));
    assert_eq!((plan.cache.size.0 >> 20, plan.short.0 >> 20), (10, 10));
}

#[test]
fn by_demand_a_vm_keeps_its_steps_when_it_stops_swapping() {
    let mut tenant =
        Tenant::new(Policy::Demand, 60, [("a", Guest::new(600)), ("b", Guest::new(300))]);
    tenant.periods(20);
    tenant.guest("a").load = 300;
    tenant.guest("b").load = 600;
    assert_eq!(tenant.periods(20), [""; 0]);
    assert_eq!(tenant.extras(), [50, 0]);
}

#[test]
fn fair_ends_equal_and_what_does_not_go_round_is_the_caches() {
    let vms = ["a", "b", "c"].map(|name| (name, Guest::new(if name == "a" { 900 } else { 100 })));
    let mut tenant = Tenant::new(Policy::Fair, 205, vms);
    tenant.periods(20);
    assert_eq!(tenant.extras(), [60, 60, 60]);
    assert_eq!(tenant.period().cache.size.0 >> 20, 25);
}

#[test]
fn the_part_beyond_a_vms_max_goes_to_the_others() {
    let vms = [
        ("a", Guest { max: 535, ..Guest::new(900) }),
        ("b", Guest::new(100)),
        ("c", Guest::new(100)),
    ];
    let mut tenant = Tenant::new(Policy::Fair, 210, vms);
    tenant.periods(20);
    assert_eq!(tenant.extras(), [20, 90, 90]);
    assert!(matches!(why(&tenant.period(), "a"), Why::AtMax { .. }));
}

#[test]
fn entitlement_ends_in_proportion_to_what_each_contributes() {
    let contributes = |contributed| Guest { contributed, ..Guest::new(900) };
    let vms = [("a", contributes(300)), ("b", contributes(100)), ("c", contributes(0))];
    let mut tenant = Tenant::new(Policy::Entitlement, 410, vms);
    tenant.periods(50);
    assert_eq!(tenant.extras(), [300, 100, 0]);
    // No VM has contributed borrowed memory, so there is nothing to borrow for.
    assert_eq!(tenant.period().short.0, 0);
}

#[test]
fn the_cache_shrinks_first_and_vms_give_only_what_it_cannot() {
    for policy in ALL {
        let vms = ["a", "b"].map(|name| (name, Guest::new(552)));
        let mut tenant = Tenant::new(policy, 100, vms);
        tenant.periods(20);
        let handed = tenant.handed();
        tenant.saved = handed;
        let plan = tenant.period();
        assert_eq!((said(&plan), plan.cache.size.0), (vec![], 0), "{policy:?}");
        tenant.saved = handed - 1;
        let plan = tenant.period();
        assert_eq!(said(&plan).len(), 1, "{policy:?}: {:?}", said(&plan));
        assert_eq!(
            plan.decisions.iter().filter(|one| matches!(one.why, Why::Deficit { .. })).count(),
            1
        );
    }
}

#[test]
fn a_deficit_is_taken_at_once_from_the_least_swapping_vm() {
    let vms = [("a", Guest::new(562)), ("b", Guest::new(532)), ("c", Guest::new(5000))];
    let mut tenant = Tenant::new(Policy::Demand, 200, vms);
    tenant.periods(50);
    assert_eq!(tenant.extras(), [50, 20, 120]);
    tenant.saved = 95;
    // 95 MiB are missing: all steps of the two that do not swap, and the rest from the third.
    assert_eq!(said(&tenant.period()), ["a -50", "b -20", "c -30"]);
}

#[test]
fn unreturned_memory_stays_a_deficit_and_is_asked_for_again() {
    let vms = [("a", Guest::new(562)), ("b", Guest::new(5000))];
    let mut tenant = Tenant::new(Policy::Demand, 150, vms);
    tenant.periods(50);
    tenant.guest("a").gives = 0;
    tenant.saved = 100;
    assert_eq!(said(&tenant.period()), ["a -40"]);
    for _ in 0..5 {
        let plan = tenant.period();
        assert_eq!((said(&plan), plan.deficit.0 >> 20, plan.cache.size.0), (vec![], 40, 0));
        assert!(matches!(why(&plan, "a"), Why::Owes { covered: false, .. }));
        assert_eq!(plan.decisions[0].to.0 >> 20, 522, "it is told again");
    }
    // After `debt_periods` periods, the group covers its deficit itself.
    let plan = tenant.period();
    assert_eq!(said(&plan), ["b -40"]);
    assert!(matches!(why(&plan, "a"), Why::Owes { covered: true, periods: 5, .. }));
    assert_eq!(tenant.period().deficit.0, 0);
    // When `a` gives, `b` gets the available steps again.
    tenant.guest("a").gives = u64::MAX;
    tenant.periods(50);
    assert_eq!(tenant.extras(), [20, 70]);
}

#[test]
fn a_guest_that_gives_step_by_step_is_waited_for() {
    let vms = [("a", Guest::new(612)), ("b", Guest::new(5000))];
    let mut tenant = Tenant::new(Policy::Demand, 210, vms);
    tenant.periods(50);
    tenant.guest("a").gives = 2;
    tenant.saved = 130;
    assert_eq!(tenant.periods(60), ["a -70"]);
    assert_eq!(tenant.extras(), [30, 100]);
}

#[test]
fn a_vm_with_untaken_steps_gets_no_more_and_gives_first() {
    let vms = [("a", Guest { takes: 0, ..Guest::new(5000) }), ("b", Guest::new(700))];
    let mut tenant = Tenant::new(Policy::Demand, 100, vms);
    tenant.periods(20);
    assert_eq!((tenant.guest("a").target, tenant.guest("b").target), (522, 592));
    assert!(matches!(why(&tenant.period(), "a"), Why::Untaken { .. }));
    tenant.saved = 80;
    assert_eq!(said(&tenant.period()), ["a -10"]);
}

#[test]
fn a_vm_that_joins_gets_its_part_and_one_that_leaves_leaves_its() {
    let vms = ["a", "b"].map(|name| (name, Guest::new(900)));
    let mut tenant = Tenant::new(Policy::Fair, 130, vms);
    tenant.periods(20);
    assert_eq!(tenant.extras(), [60, 60]);
    tenant.guests.insert("c".into(), Guest::new(100));
    tenant.periods(20);
    assert_eq!(tenant.extras(), [40, 40, 40]);
    tenant.guests.remove("a");
    tenant.periods(20);
    assert_eq!(tenant.extras(), [60, 60]);
}

#[test]
fn a_joining_vms_surplus_counts_and_may_be_a_deficit() {
    let mut tenant = Tenant::new(Policy::Demand, 20, [("a", Guest::new(300))]);
    tenant.periods(5);
    tenant.guests.insert("b".into(), Guest { size: 572, target: 572, ..Guest::new(300) });
    assert_eq!(said(&tenant.period()), ["b -40"]);
    assert_eq!(tenant.period().deficit.0, 0);
}

#[test]
fn a_lowered_max_applies_at_once_and_never_below_base() {
    let mut tenant = Tenant::new(Policy::Demand, 200, [("a", Guest::new(900))]);
    tenant.periods(50);
    tenant.guest("a").max = 600;
    let plan = tenant.period();
    assert_eq!((said(&plan), tenant.guest("a").size), (vec!["a -110".to_owned()], 592));
    tenant.guest("a").max = 100;
    tenant.saved = 0;
    tenant.periods(3);
    assert_eq!(tenant.guest("a").size, 512);
}

#[test]
fn awaited_memory_is_not_handed_out_and_costs_no_vm_a_step() {
    for policy in ALL {
        let vms = ["a", "b"].map(|name| (name, Guest::new(900)));
        let mut tenant = Tenant::new(policy, 50, vms);
        tenant.periods(20);
        assert_eq!(tenant.extras(), [20, 20]);
        (tenant.saved, tenant.awaited) = (100, 60);
        assert_eq!(tenant.periods(20), [""; 0], "{policy:?}");
        tenant.awaited = 0;
        tenant.periods(20);
        assert_eq!(
            tenant.extras().iter().sum::<u64>(),
            if policy == Policy::Demand { 90 } else { 80 }
        );
    }
}

#[test]
fn a_surplus_that_swings_by_what_the_cache_keeps_moves_nobody() {
    for policy in ALL {
        for saved in [95, 100, 123, 240, 1000] {
            let vms = ["a", "b", "c"].map(|name| (name, Guest::new(900)));
            let mut tenant = Tenant::new(policy, saved, vms);
            tenant.periods(200);
            let mut moves = Vec::new();
            for period in 0..400 {
                tenant.saved = saved - 5 + [0, 10, 3, 7][period % 4];
                let moved = tenant.periods(1);
                if period > 20 {
                    moves.extend(moved);
                }
            }
            assert_eq!(moves, [""; 0], "{policy:?} {saved}");
        }
    }
}
