//! What limits did to each lease, for `status` and `why`.

use std::collections::BTreeMap;
use std::time::Duration;

use aquifer_api::status::LeaseTraffic;
use aquifer_control::Subject;
use aquifer_page::{Bytes, LeaseId};
use aquifer_transport::serving::limits::{Borrower, Gate};

/// The shortest time between two decisions about one lease.
const INTERVAL: Duration = Duration::from_secs(60);
/// Waits of a lease's requests, all together, that are worth a decision.
const NOTABLE: Duration = Duration::from_millis(500);

/// The waits that `why` has told of. A lease that moves with its region gets another borrower.
#[derive(Debug, Default)]
pub(crate) struct Waits(BTreeMap<(Borrower, LeaseId), Told>);

#[derive(Debug, Default)]
struct Told {
    at: Option<Duration>,
    waited: Duration,
}

impl Waits {
    /// Returns a sentence, with this host as the subject, for each lease whose requests have waited
    /// notably long since the last one. `now` is a time since the start.
    pub(crate) fn begun(&mut self, gate: &Gate, now: Duration) -> Vec<(String, Vec<Subject>)> {
        let all = gate.by_lease();
        self.0.retain(|(borrower, lease), _| {
            all.iter().any(|one| (&one.borrower, one.lease) == (borrower, *lease))
        });
        let mut begun = Vec::new();
        for one in all {
            let Some(limit) = one.limit else { continue };
            let told = self.0.entry((one.borrower.clone(), one.lease)).or_default();
            let waited = one.waited.saturating_sub(told.waited);
            if waited < NOTABLE || told.at.is_some_and(|at| now - at < INTERVAL) {
                continue;
            }
            *told = Told { at: Some(now), waited: one.waited };
            let what = format!(
                "holds back {} at lease {} by {limit}: its requests have waited {:.1} s",
                one.borrower,
                one.lease,
                waited.as_secs_f64()
            );
            let host = match one.borrower {
                Borrower::Host(host) => Some(Subject::Host(host)),
                _ => None,
            };
            begun.push((what, host.into_iter().chain([Subject::Lease(one.lease)]).collect()));
        }
        begun
    }
}

/// Returns what borrowers did with each lease since the agent started.
///
/// A lease that moved with its region has had several borrowers. Their figures add up.
pub(crate) fn traffic(gate: Option<&Gate>) -> BTreeMap<LeaseId, LeaseTraffic> {
    let mut by_lease: BTreeMap<LeaseId, LeaseTraffic> = BTreeMap::new();
    for one in gate.map(Gate::by_lease).unwrap_or_default() {
        let sum = by_lease.entry(one.lease).or_insert_with(|| LeaseTraffic {
            read: Bytes::ZERO,
            written: Bytes::ZERO,
            waiting: 0,
            waited_s: 0.0,
            limit: None,
        });
        sum.read = sum.read.saturating_add(one.traffic.sent);
        sum.written = sum.written.saturating_add(one.traffic.received);
        sum.waiting += one.waiting;
        sum.waited_s += one.waited.as_secs_f64();
        sum.limit = one.limit.map(|limit| limit.to_string()).or(sum.limit.take());
    }
    by_lease
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use aquifer_page::HostName;
    use aquifer_transport::serving::limits::{Allowance, LendingLimits, RequestRate, Traffic};

    use super::*;

    #[test]
    fn a_lease_that_waits_is_told_of_once_a_minute() {
        let seconds = Arc::new(AtomicU64::new(0));
        let clock = Arc::clone(&seconds);
        let lease = Allowance { requests: Some(RequestRate(1)), ..Allowance::default() };
        let limits = LendingLimits { lease, ..LendingLimits::default() };
        let gate =
            Gate::with_clock(limits, move || Duration::from_secs(clock.load(Ordering::SeqCst)));
        let host = HostName::try_from("b".to_owned()).unwrap();
        let mut pass = gate.enter(Borrower::Host(host.clone()), LeaseId(7)).unwrap();
        let mut waits = Waits::default();
        let mut told = Vec::new();
        for _ in 0..100 {
            // Until a request has to wait; the clock stands still meanwhile.
            let now = loop {
                let mut now = None;
                let wait = |_: &mut (), _| {
                    now = Some(Duration::from_secs(seconds.fetch_add(2, Ordering::SeqCst)));
                    Ok::<_, ()>(())
                };
                pass.wait(Traffic::default(), &mut (), |_| Ok(()), wait).unwrap();
                if let Some(now) = now {
                    break now;
                }
            };
            told.extend(waits.begun(&gate, now).into_iter().map(|(what, about)| {
                assert_eq!(about, [Subject::Host(host.clone()), Subject::Lease(LeaseId(7))]);
                (now.as_secs(), what)
            }));
        }
        assert_eq!(told.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [0, 60, 120, 180]);
        let lease = LeaseId(7);
        let first = format!("holds back host b at lease {lease} by lease_requests: ");
        assert_eq!(told[0].1, format!("{first}its requests have waited 2.0 s"));
        let by_lease = traffic(Some(&gate));
        assert_eq!(by_lease[&lease].limit.as_deref(), Some("lease_requests"));
        assert!(by_lease[&lease].waited_s >= 199.0);
    }
}
