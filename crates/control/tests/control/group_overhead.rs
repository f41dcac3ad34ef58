//! Tests of GRP-M by sequences of periods: which group lends, when the loan comes back, and which
//! pays.

use aquifer_control::group::overhead::{Plan, Why};
use aquifer_control::group::reprovision::Policy;

use crate::tenant::host::{Host, account, loans};
use crate::tenant::{Guest, Tenant};

fn group(saved: u64, loads: [u64; 2]) -> Tenant {
    let [a, b] = loads.map(Guest::new);
    Tenant::new(Policy::Demand, saved, [("a", a), ("b", b)])
}

/// The paper's first scenario (section 7.2): NPB BT needs no memory, word count does.
fn host() -> Host {
    Host::new([("bt", group(400, [300, 300])), ("wc", group(50, [600, 650]))])
}

fn last(host: &mut Host, periods: usize) -> Plan {
    host.periods(periods - 1);
    host.period()
}

#[test]
fn a_borrowing_group_pays_for_the_scanner_of_its_lender() {
    let mut host = host();
    // No loan during the first periods: the lender must be idle for a while, and the borrower
    // short.
    assert_eq!(host.periods(4), []);
    let plan = last(&mut host, 40);
    assert_eq!(host.tenant("wc").swaps(), 0);
    assert_eq!(host.tenant("wc").extras(), [90, 140]);
    assert_eq!(account(&plan, "bt").payer.as_str(), "wc");
    assert_eq!(account(&plan, "wc").payer.as_str(), "wc");
    // The sharing of `wc` saves 50 of its 230 MiB. The group has returned the bytes that only its
    // cache would use.
    assert_eq!(loans(&plan), ["bt>wc 180+0"]);
    assert!(account(&plan, "bt").to_string().ends_with("180MiB is lent; wc pays for its scanner"));
    assert_eq!(host.periods(50), []);
}

#[test]
fn loans_need_the_consent_of_both_groups_and_end_with_it() {
    for refuses in ["bt", "wc"] {
        let mut host = host();
        host.refuses = vec![refuses.to_owned()];
        assert_eq!(host.periods(50), []);
        host.refuses.clear();
        last(&mut host, 50);
        host.refuses = vec![refuses.to_owned()];
        let plan = host.period();
        assert_eq!((plan.changes.len(), plan.changes[0].why), (1, Why::NoConsent));
        assert_eq!(loans(&plan), ["bt>wc 0+180"]);
        assert_eq!(account(&plan, "bt").payer.as_str(), "bt");
        assert_eq!(loans(&host.period()), [""; 0]);
        assert_eq!(host.tenant("wc").handed(), 50);
    }
}

#[test]
fn an_owner_that_swaps_recalls_all_its_loans_at_once() {
    let mut host = host();
    last(&mut host, 50);
    // NPB DT begins.
    host.tenant("bt").guest("a").load = 700;
    let plan = host.period();
    assert!(
        matches!(plan.changes[..], [ref one] if matches!(one.why, Why::OwnerSwaps { .. })),
        "{plan:?}"
    );
    assert_eq!(account(&plan, "bt").surplus().awaited.0 >> 20, 180);
    host.period();
    assert_eq!(host.tenant("wc").handed(), 50);
    last(&mut host, 50);
    // `bt` lends again the bytes that it does not need even so.
    assert_eq!(host.tenant("bt").extras(), [190, 0]);
    assert_eq!(host.tenant("wc").handed(), 230);
}

#[test]
fn a_falling_surplus_recalls_the_missing_part() {
    let mut host = host();
    last(&mut host, 50);
    host.saves("bt", 155);
    let plan = host.period();
    assert!(matches!(plan.changes[0].why, Why::SurplusFell { missing } if missing.0 >> 20 == 25));
    assert_eq!(loans(&plan), ["bt>wc 150+30"]);
    assert_eq!(loans(&host.period()), ["bt>wc 150+0"]);
    assert_eq!(host.tenant("wc").handed(), 200);
}

#[test]
fn an_unreturned_loan_takes_nothing_from_the_owners_vms() {
    let mut host = host();
    last(&mut host, 50);
    host.tenant("bt").guest("b").load = 600;
    last(&mut host, 2);
    // `bt` holds some of its savings itself, and lends again when it is idle.
    last(&mut host, 60);
    let own = host.tenant("bt").extras();
    assert_eq!(own, [0, 90]);
    for name in ["a", "b"] {
        host.tenant("wc").guest(name).gives = 0;
    }
    host.saves("bt", 90);
    for _ in 0..50 {
        let plan = host.period();
        assert_eq!(account(&plan, "bt").lent.0, 0);
        assert!(account(&plan, "bt").awaited.0 > 0 && account(&plan, "wc").owed.0 > 0);
        assert_eq!(host.tenant("bt").extras(), own);
    }
    for name in ["a", "b"] {
        host.tenant("wc").guest(name).gives = u64::MAX;
    }
    last(&mut host, 5);
    assert!(host.tenant("wc").handed() <= 50 && host.tenant("bt").extras() == own);
    assert_eq!(loans(&host.period()), [""; 0]);
}

#[test]
fn a_borrower_returns_idle_loans() {
    let mut host = host();
    last(&mut host, 50);
    host.tenant("wc").guests.remove("b");
    let plan = host.period();
    assert!(matches!(plan.changes[0].why, Why::NotNeeded { .. }));
    assert_eq!(loans(&plan), ["bt>wc 40+0"]);
}

#[test]
fn a_group_that_is_gone_has_lent_and_borrowed_nothing() {
    for gone in ["bt", "wc"] {
        let mut host = host();
        last(&mut host, 50);
        let group = host.tenants.remove(gone);
        let plan = host.period();
        assert_eq!((plan.changes[0].why, loans(&plan)), (Why::Gone, vec![]));
        last(&mut host, 3);
        let (held, saved) = host.held_of();
        assert!(held <= saved, "{gone} is gone: {held} of {saved}");
        // If the group returns, it must be idle for a while until it lends.
        host.tenants.extend(group.map(|group| (gone.to_owned(), group)));
        assert_eq!(host.periods(3).is_empty(), gone == "bt");
    }
}

#[test]
fn most_swapping_borrows_first_and_largest_borrower_pays() {
    let tenants = [
        ("bt", group(300, [300, 300])),
        ("sort", group(0, [900, 300])),
        ("wc", group(0, [560, 300])),
    ];
    let mut host = Host::new(tenants);
    let plan = last(&mut host, 60);
    // The lender's reserve is one step, and one step is in the cache of the group that still swaps.
    assert_eq!(loans(&plan), ["bt>sort 240+0", "bt>wc 50+0"]);
    assert_eq!(account(&plan, "bt").payer.as_str(), "sort");
    // When some is missing, the group that does not swap gives first.
    host.saves("bt", 260);
    assert_eq!(loans(&host.period()), ["bt>sort 240+0", "bt>wc 20+30"]);
}

#[test]
fn a_borrower_stays_with_its_lender_until_that_has_no_more() {
    let tenants = [
        ("one", group(100, [300, 300])),
        ("two", group(200, [300, 300])),
        ("wc", group(0, [900, 300])),
    ];
    let mut host = Host::new(tenants);
    host.periods(15);
    let plan = host.period();
    assert_eq!(plan.loans.len(), 1, "{:?}", loans(&plan));
    let plan = last(&mut host, 60);
    assert_eq!(loans(&plan), ["one>wc 90+0", "two>wc 190+0"]);
    assert!(["one", "two"].iter().all(|one| account(&plan, one).payer.as_str() == "wc"));
}

#[test]
fn a_group_lends_only_after_some_periods_without_swap() {
    let mut host = host();
    for period in 0..60 {
        host.tenant("bt").guest("a").load = if period % 5 == 4 { 513 + 10 * period } else { 300 };
        assert_eq!(host.periods(1), [], "{period}");
    }
}
