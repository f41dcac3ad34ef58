//! The figures of a store: stored, taken, promised and shared bytes.

use std::collections::BTreeMap;

use aquifer_page::{Bytes, Group, HostName, LeaseId};
use serde::Serialize;

use crate::Lease;

/// A store's figures: in total, by group and by lease. Read from counters: exact while no thread
/// writes, otherwise perhaps a page apart.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Usage {
    /// Stored bytes, each page of each lease counted.
    pub stored: Bytes,
    /// RAM that the pages really take.
    pub taken: Bytes,
    /// The most that all leases together may store.
    pub promised: Bytes,
    /// The same for each group.
    pub groups: BTreeMap<Group, GroupUsage>,
    /// Each lease, by id.
    pub leases: Vec<LeaseUsage>,
}

/// The figures of one group's leases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GroupUsage {
    /// Stored bytes, each page of each lease counted.
    pub stored: Bytes,
    /// RAM that the group's pages really take.
    pub taken: Bytes,
    /// The most that the group's leases together may store.
    pub promised: Bytes,
    /// The figures of the group's sharing leases.
    pub shared: SharedUsage,
}

/// The figures of one group's sharing leases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SharedUsage {
    /// Stored bytes, each page of each lease counted, with leases that were [left
    /// alone](crate::Finding::Unusable).
    pub stored: Bytes,
    /// RAM that the group's frames really take, with frames (about 2 MiB at most) that are kept for
    /// the next writes.
    pub taken: Bytes,
    /// RAM saved: `stored` less the frames that hold it.
    pub saved: Bytes,
    /// Frames to which more than one page refers.
    pub shared_frames: u64,
    /// Copy-on-write breaks since the store was opened: writes that moved a page to another frame
    /// while other pages still refer to the old one. Pages that become holes do not count.
    pub breaks: u64,
}

/// The figures of one lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeaseUsage {
    /// The lease.
    pub id: LeaseId,
    /// The host that uses it.
    pub borrower: HostName,
    /// The tenant to which it is accounted.
    pub group: Group,
    /// Whether it shares with its group.
    pub shared: bool,
    /// Stored bytes, even if other leases share the frames.
    pub stored: Bytes,
    /// The most it may store, in bytes.
    pub quota: Bytes,
    /// Its size as an address space.
    pub capacity: Bytes,
}

impl Usage {
    /// Adds up `leases`; `shared` has the figures of those that share, by group.
    pub(crate) fn of<'a>(
        leases: impl Iterator<Item = &'a Lease>,
        shared: impl Iterator<Item = (Group, SharedUsage)>,
    ) -> Self {
        let mut usage = Self::default();
        for (group, shared) in shared {
            usage.taken += shared.taken;
            usage
                .groups
                .insert(group, GroupUsage { taken: shared.taken, shared, ..GroupUsage::default() });
        }
        for lease in leases {
            let (stored, quota) = (lease.stored(), lease.quota());
            let taken = if lease.is_shared() { Bytes::ZERO } else { stored };
            let group = usage.groups.entry(lease.group().clone()).or_default();
            group.stored += stored;
            group.taken += taken;
            group.promised += quota;
            usage.stored += stored;
            usage.taken += taken;
            usage.promised += quota;
            usage.leases.push(LeaseUsage {
                id: lease.id(),
                borrower: lease.borrower().clone(),
                group: lease.group().clone(),
                shared: lease.is_shared(),
                stored,
                quota,
                capacity: lease.capacity(),
            });
        }
        usage
    }
}
