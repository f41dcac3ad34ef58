//! Property tests: for any readings, a plan stays within the free memory and each VM's limits.

use std::collections::BTreeMap;

use aquifer_control::balance::{Balancer, Because, Config, Host, Limits, Plan, Reading};
use aquifer_page::{Bytes, RegionName};
use proptest::prelude::*;

fn size() -> impl Strategy<Value = Bytes> {
    prop_oneof![
        8 => (0..100u64).prop_map(|sections| Bytes::mib(128 * sections)),
        4 => (0..16_000u64).prop_map(Bytes::mib),
        1 => (0..1u64 << 34).prop_map(Bytes),
    ]
}

fn extreme() -> impl Strategy<Value = Bytes> {
    prop_oneof![20 => size(), 1 => any::<u64>().prop_map(Bytes), 1 => Just(Bytes(u64::MAX))]
}

fn limits() -> impl Strategy<Value = Limits> {
    let weight = prop_oneof![Just(0), Just(1), Just(100), Just(u32::MAX), any::<u32>()];
    (extreme(), extreme(), weight).prop_map(|(min, max, weight)| Limits {
        min,
        max,
        weight,
        reserve: Bytes::ZERO,
    })
}

prop_compose! {
    fn reading(vms: usize)(
        vm in 0..vms,
        size in size(),
        // Shares of the size, and of the total.
        (total, available) in (0.5..1.01f64, 0.0..1.01f64),
        (swap_in, swap_out) in (0..1u64 << 24, 0..1u64 << 24),
        swap_used in prop_oneof![3 => Just(Bytes::ZERO), 1 => extreme()],
        pressure in prop_oneof![
            Just(None),
            (0.0..100.0f64).prop_map(Some),
            Just(Some(f64::NAN)),
            Just(Some(f64::INFINITY)),
        ],
        wish in prop_oneof![6 => Just(Bytes::ZERO), 1 => extreme()],
        limits in limits(),
        answers in prop::bool::weighted(0.9),
        busy in prop::bool::weighted(0.1),
    ) -> Reading {
        let total = size.scaled(total);
        let vm = format!("vm{vm}").parse().expect("it is a name");
        Reading {
            vm, size, total, available: total.scaled(available), swap_in, swap_out, swap_used,
            pressure, wish, limits, answers, busy,
        }
    }
}

fn host() -> impl Strategy<Value = Host> {
    let section = prop_oneof![
        8 => Just(Bytes::mib(128)),
        1 => Just(Bytes::mib(2)),
        1 => Just(Bytes::gib(1)),
        1 => (0..1u64 << 30).prop_map(Bytes),
    ];
    let lent = prop_oneof![2 => Just(Bytes::ZERO), 1 => size()];
    (size(), lent, section, prop::bool::weighted(0.1)).prop_map(
        |(sections_free, recallable, section, short)| Host {
            sections_free,
            recallable,
            section,
            short,
        },
    )
}

fn config() -> impl Strategy<Value = Config> {
    let times = (0..4u32, 0..4u32);
    (0.0..1.0f64, size(), times, any::<bool>(), any::<bool>()).prop_map(
        |(slack, least_slack, (surplus_periods, hold_after_grow), swap_is_need, keep_surplus)| {
            Config {
                slack,
                least_slack: Bytes(least_slack.0 / 8),
                surplus_periods,
                hold_after_grow,
                swap_is_need,
                keep_surplus,
                ..Config::default()
            }
        },
    )
}

/// Checks the invariants of each plan.
fn check(config: &Config, host: &Host, readings: &[Reading], plan: &Plan) {
    let mut firsts: BTreeMap<&RegionName, &Reading> = BTreeMap::new();
    for reading in readings {
        firsts.entry(&reading.vm).or_insert(reading);
    }
    assert_eq!(plan.decisions.len(), firsts.len(), "one decision each");
    let mut sizes: BTreeMap<&RegionName, Bytes> =
        firsts.iter().map(|(vm, reading)| (*vm, reading.size)).collect();
    let mut free = u128::from(host.sections_free.0);
    let (mut shrunk, mut recalled) = (false, false);
    assert!(plan.recall <= host.recallable, "{plan:?}");
    for one in &plan.moves {
        let reading = firsts[&one.vm];
        let limits = reading.limits;
        assert_eq!(sizes.insert(&one.vm, one.to), Some(one.from), "one move for each VM");
        assert!(reading.answers && !reading.busy, "{one}");
        assert_eq!(one.from.0.abs_diff(one.to.0) % host.section.0, 0, "{one}");
        if one.to > one.from {
            let Because::Grows { waits, .. } = one.because else { panic!("{one}") };
            assert!(one.to <= limits.max, "{one}");
            assert!(!waits || shrunk || plan.recall > Bytes::ZERO, "{one} waits for nothing");
            // What is recalled comes after what is free.
            if waits && !std::mem::replace(&mut recalled, true) {
                free += u128::from(plan.recall.0);
            }
            // In this order, each VM has the memory to grow by when its move begins.
            let grows = u128::from(one.to.0 - one.from.0);
            assert!(grows <= free, "{one} with {free} free");
            free -= grows;
        } else {
            assert!(one.to < one.from && matches!(one.because, Because::Shrinks { .. }), "{one}");
            assert!(one.to >= limits.min.min(limits.max), "{one}");
            let used = reading.total.saturating_sub(reading.available);
            assert!(one.to >= used.saturating_add(config.least_slack), "{one} takes what is used");
            free += u128::from(one.from.0 - one.to.0);
            shrunk = true;
        }
    }
    let all =
        |sizes: &mut dyn Iterator<Item = Bytes>| sizes.map(|size| u128::from(size.0)).sum::<u128>();
    let before = all(&mut firsts.values().map(|reading| reading.size));
    let after = all(&mut sizes.values().copied());
    let most = before + u128::from(host.sections_free.0) + u128::from(plan.recall.0);
    assert!(after <= most, "{plan:?}");
    let grows = plan.moves.iter().any(|one| one.to > one.from);
    assert!(grows || plan.recall == Bytes::ZERO, "it recalls for nobody: {plan:?}");
    for decision in &plan.decisions {
        assert_eq!(sizes[&decision.vm], decision.to, "{decision}");
        assert!(decision.to_string().starts_with(decision.vm.as_str()));
    }
    let json = serde_json::to_string(plan).expect("a plan can be written");
    serde_json::from_str::<Plan>(&json).expect("and read again");
}

proptest! {
    #![proptest_config(crate::cases(500))]

    #[test]
    fn no_plan_goes_beyond_what_there_is_or_what_anybody_may_have(
        config in config(),
        periods in prop::collection::vec((host(), prop::collection::vec(reading(5), 0..6)), 1..12),
    ) {
        let mut balancer = Balancer::new(config.clone());
        for (host, readings) in periods {
            let plan = balancer.step(&host, &readings);
            check(&config, &host, &readings, &plan);
        }
    }

    /// Sizes follow the plans, so that surpluses last and shares are divided.
    #[test]
    fn no_plan_of_a_history_goes_beyond_either(
        config in config(),
        readings in prop::collection::vec(reading(5), 1..6),
        used in prop::collection::vec(0.0..1.0f64, 5 * 30),
        host in host(),
    ) {
        let mut balancer = Balancer::new(config.clone());
        let (mut host, mut readings) = (host, readings);
        readings.sort_by(|one, other| one.vm.cmp(&other.vm));
        readings.dedup_by(|one, other| one.vm == other.vm);
        for shares in used.chunks(5) {
            let plan = balancer.step(&host, &readings);
            check(&config, &host, &readings, &plan);
            for one in &plan.moves {
                let reading = readings.iter_mut().find(|reading| reading.vm == one.vm).unwrap();
                let free = u128::from(host.sections_free.0) + u128::from(one.from.0);
                host.sections_free = Bytes(free.saturating_sub(u128::from(one.to.0)) as u64);
                reading.size = one.to;
            }
            for (reading, &share) in readings.iter_mut().zip(shares) {
                reading.total = reading.size;
                reading.available = reading.size.scaled(share);
                reading.swap_out += (share * 4e6) as u64;
            }
        }
    }
}
