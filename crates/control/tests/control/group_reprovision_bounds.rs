//! Property tests: a group hands out no more than its surplus, and comes to rest with steady
//! figures.

use aquifer_control::group::Surplus;
use aquifer_control::group::reprovision::{Config, Policy, Reprovisioner, Vm};
use aquifer_page::Bytes;
use proptest::prelude::*;

use crate::tenant::{Guest, STEP, Tenant, check};

fn policy() -> impl Strategy<Value = Policy> {
    prop_oneof![Just(Policy::Demand), Just(Policy::Fair), Just(Policy::Entitlement)]
}

prop_compose! {
    fn guest()(
        base in 64..2048u64,
        room in 0..1024u64,
        load in 0..3000u64,
        contributed in prop_oneof![1 => Just(0), 4 => 0..500u64],
        gives in prop_oneof![4 => Just(u64::MAX), 1 => 0..20u64],
        takes in prop_oneof![4 => Just(u64::MAX), 1 => 0..20u64],
    ) -> Guest {
        Guest { base, max: base + room, size: base, target: base, load, contributed, gives, takes }
    }
}

const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];

fn tenant(policy: Policy, saved: u64, guests: Vec<Guest>) -> Tenant {
    Tenant::new(policy, saved, NAMES.into_iter().zip(guests))
}

fn obedient(guests: Vec<Guest>) -> Vec<Guest> {
    guests.into_iter().map(|guest| Guest { gives: u64::MAX, takes: u64::MAX, ..guest }).collect()
}

/// Checks each VM's share at rest.
fn at_rest(tenant: &Tenant) {
    let (saved, keep) = (tenant.saved, STEP);
    let room = |guest: &Guest| (guest.max - guest.base) / STEP * STEP;
    match tenant.config.policy {
        Policy::Demand => {
            let left = saved.saturating_sub(tenant.handed());
            for guest in tenant.guests.values() {
                let fed = guest.swaps() == 0 || guest.extra() == room(guest) || left < STEP + keep;
                assert!(fed, "{guest:?} with {left} left");
                assert!(
                    guest.extra() == 0 || guest.size < guest.load + STEP,
                    "{guest:?} did not swap"
                );
            }
        }
        Policy::Fair => {
            let most = tenant.extras().into_iter().max().unwrap_or(0);
            assert!(
                tenant.guests.values().all(|guest| guest.extra() == room(guest).min(most)),
                "{tenant:?}"
            );
            let open =
                tenant.guests.values().filter(|guest| guest.extra() < room(guest)).count() as u64;
            let left = saved.saturating_sub(tenant.handed());
            assert!(open == 0 || left < open * STEP + keep, "{left} left of {tenant:?}");
        }
        Policy::Entitlement => {
            let all: u64 = tenant.guests.values().map(|guest| guest.contributed).sum();
            for guest in tenant.guests.values() {
                let part = |saved: u64| saved * guest.contributed / all.max(1);
                let least = part(saved.saturating_sub(keep)).min(room(guest));
                assert!(guest.extra() + STEP > least, "{guest:?} of {tenant:?}");
                assert!(guest.extra() <= part(saved) + STEP, "{guest:?} of {tenant:?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(crate::cases(100))]

    /// The tenant itself checks each period.
    #[test]
    fn no_period_hands_out_more_than_there_is_or_anybody_may_have(
        policy in policy(),
        guests in prop::collection::vec(guest(), 1..6),
        periods in prop::collection::vec(
            (0..3000u64, 0..200u64, 0..6usize, 0..3000u64, 0..10u8),
            100,
        ),
    ) {
        let mut tenant = tenant(policy, 0, guests);
        for (saved, awaited, which, load, what) in periods {
            let name = NAMES[which];
            match what {
                0 => { tenant.guests.remove(name); }
                1 => { tenant.guests.entry(name.to_owned()).or_insert_with(|| Guest::new(load)); }
                2 => (tenant.saved, tenant.awaited) = (saved, awaited),
                3 => tenant.awaited = 0,
                4..7 => if let Some(guest) = tenant.guests.get_mut(name) { guest.load = load },
                // Copies break and pages merge at random.
                _ => tenant.saved = (tenant.saved + saved / 50).saturating_sub(load / 50),
            }
            tenant.period();
        }
    }

    #[test]
    fn steady_loads_come_to_rest_where_the_policy_says(
        policy in policy(),
        guests in prop::collection::vec(guest(), 1..6),
        (before, after) in (0..3000u64, 0..3000u64),
    ) {
        let mut tenant = tenant(policy, before, obedient(guests));
        tenant.periods(400);
        prop_assert_eq!(tenant.periods(50), [""; 0]);
        at_rest(&tenant);
        tenant.saved = after;
        tenant.period();
        prop_assert!(tenant.handed() <= after, "guests are obedient");
        tenant.periods(400);
        prop_assert_eq!(tenant.periods(50), [""; 0]);
    }

    /// The other guests cover a guest that never gives, so that no other group has to.
    #[test]
    fn a_group_covers_its_deficit_if_any_of_its_guests_gives(
        policy in policy(),
        guests in prop::collection::vec(guest(), 2..6),
        (before, after) in (200..3000u64, 0..3000u64),
    ) {
        let mut tenant = tenant(policy, before, obedient(guests));
        tenant.periods(400);
        tenant.guest("a").gives = 0;
        tenant.saved = after;
        tenant.periods(30);
        let refused = tenant.guest("a").extra();
        let held = tenant.handed();
        prop_assert!(held <= after.max(refused), "{held} held of {after}");
        tenant.guest("a").gives = u64::MAX;
        tenant.periods(400);
        prop_assert!(tenant.handed() <= after);
        prop_assert_eq!(tenant.periods(50), [""; 0]);
    }

    #[test]
    fn readings_that_cannot_be_do_no_harm(
        policy in policy(),
        figures in prop::collection::vec(prop::array::uniform6(0..1u64 << 40), 1..6),
        surplus in (0..1u64 << 42, 0..1u64 << 42),
        (keep, debt_periods) in (0..1u64 << 28, 0..3u32),
    ) {
        let config = Config { policy, keep: Bytes(keep), debt_periods, ..Config::default() };
        let mut reprovisioner = Reprovisioner::new(config.clone());
        let vms: Vec<Vm> = figures.iter().zip(NAMES).map(|(figures, name)| {
            let [base, max, size, target, swapped, contributed] = figures.map(Bytes);
            Vm { vm: name.parse().unwrap(), base, max, size, target, swapped, contributed }
        }).collect();
        let surplus = Surplus { bytes: Bytes(surplus.0), awaited: Bytes(surplus.1) };
        for _ in 0..5 {
            check(&config, surplus, &vms, &reprovisioner.step(surplus, &vms));
        }
    }
}

#[test]
fn the_largest_figures_there_are_overflow_nothing() {
    let vm = |name: &str| {
        let most = Bytes(u64::MAX);
        let vm = name.parse().unwrap();
        Vm {
            vm,
            base: Bytes::ZERO,
            max: most,
            size: most,
            target: most,
            swapped: most,
            contributed: most,
        }
    };
    for policy in [Policy::Demand, Policy::Fair, Policy::Entitlement] {
        let config =
            Config { policy, step: Bytes::ZERO, keep: Bytes(u64::MAX), ..Config::default() };
        let mut reprovisioner = Reprovisioner::new(config);
        for bytes in [0, 1, u64::MAX] {
            let surplus = Surplus { bytes: Bytes(bytes), awaited: Bytes(u64::MAX - bytes) };
            let plan = reprovisioner.step(surplus, &[vm("a"), vm("b"), vm("a")]);
            assert_eq!(plan.decisions.len(), 2, "a VM counts once, however often it is read");
        }
    }
}
