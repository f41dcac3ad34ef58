//! What limits did to each lease, for the status.

use std::collections::BTreeMap;

use aquifer_api::status::LeaseTraffic;
use aquifer_page::{Bytes, LeaseId};
use aquifer_transport::serving::limits::Gate;

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
