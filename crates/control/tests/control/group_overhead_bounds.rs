//! Property tests: no loan exceeds its owner's spare memory, to the byte, and steady groups come to
//! rest.

use aquifer_control::group::overhead::{Config, Ledger, Reading};
use aquifer_control::group::reprovision::Policy;
use aquifer_page::Bytes;
use proptest::prelude::*;

use crate::tenant::host::{Host, check};
use crate::tenant::{Guest, Tenant};

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

fn policy() -> impl Strategy<Value = Policy> {
    prop_oneof![3 => Just(Policy::Demand), 1 => Just(Policy::Fair), 1 => Just(Policy::Entitlement)]
}

fn group() -> impl Strategy<Value = (Policy, u64, Vec<u64>)> {
    (policy(), 0..500u64, prop::collection::vec(0..1000u64, 1..4))
}

fn host(groups: Vec<(Policy, u64, Vec<u64>)>) -> Host {
    let tenant = |(policy, saved, loads): (Policy, u64, Vec<u64>)| {
        Tenant::new(policy, saved, NAMES.into_iter().zip(loads.into_iter().map(Guest::new)))
    };
    Host::new(NAMES.into_iter().zip(groups.into_iter().map(tenant)))
}

proptest! {
    #![proptest_config(crate::cases(50))]

    /// The host and each tenant check each period.
    #[test]
    fn no_period_lends_more_than_its_owner_can_spare(
        groups in prop::collection::vec(group(), 2..5),
        periods in prop::collection::vec((0..4usize, 0..3usize, 0..1000u64, 0..12u8), 100),
    ) {
        let mut host = host(groups);
        let count = host.tenants.len();
        for (which, vm, figure, what) in periods {
            let name = NAMES[which % count];
            let guest = host.tenant(name).guests.get_mut(NAMES[vm]);
            match (what, guest) {
                (0, _) => host.saves(name, figure / 2),
                (1, _) => host.refuses.push(name.to_owned()),
                (2, _) => host.refuses.clear(),
                (3, Some(guest)) => guest.gives = figure % 20,
                (4, Some(guest)) => guest.gives = u64::MAX,
                (5..8, Some(guest)) => guest.load = figure,
                _ => {}
            }
            host.period();
        }
        // With obedient guests, the savings soon cover all memory that VMs hold, from any state.
        for tenant in host.tenants.values_mut() {
            for guest in tenant.guests.values_mut() {
                (guest.gives, guest.takes) = (u64::MAX, u64::MAX);
            }
        }
        host.periods(10);
        let (held, saved) = host.held_of();
        prop_assert!(held <= saved, "{held} held of {saved}");
    }

    #[test]
    fn steady_loads_come_to_rest(groups in prop::collection::vec(group(), 2..5)) {
        let mut host = host(groups);
        host.periods(600);
        prop_assert_eq!(host.periods(50), []);
        let handed: Vec<_> = host.tenants.values().map(Tenant::extras).collect();
        host.periods(50);
        prop_assert_eq!(host.tenants.values().map(Tenant::extras).collect::<Vec<_>>(), handed);
    }

    #[test]
    fn readings_that_cannot_be_do_no_harm(
        periods in prop::collection::vec(
            prop::collection::vec(
                (
                    any::<bool>(),
                    prop::array::uniform4(prop_oneof![Just(0), 0..1u64 << 32, 0..1u64 << 45]),
                ),
                1..5,
            ),
            30,
        ),
    ) {
        let config = Config { idle_periods: 0, ..Config::default() };
        let mut ledger = Ledger::new(config.clone());
        for period in periods {
            let reading = |(name, (consents, figures)): (&&str, (bool, [u64; 4]))| {
                let [saved, handed, swapped, short] = figures.map(Bytes);
                Reading { group: name.parse().unwrap(), consents, saved, handed, swapped, short }
            };
            let readings: Vec<Reading> = NAMES.iter().zip(period).map(reading).collect();
            check(&config, &readings, &ledger.step(&readings));
        }
    }
}
