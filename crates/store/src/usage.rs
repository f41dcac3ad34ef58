use std::collections::BTreeMap;

use aquifer_page::{Bytes, Group, HostName, LeaseId};
use serde::Serialize;

use crate::Lease;

/// What a store holds, in all and for whom. Read from counters: the figures are exact where nobody writes, and else may be
/// a page apart.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Usage {
    /// What is stored, each page of each lease counted.
    pub stored: Bytes,
    /// RAM that pages really take.
    pub taken: Bytes,
    /// What all leases together may store.
    pub promised: Bytes,
    /// The same for each group.
    pub groups: BTreeMap<Group, GroupUsage>,
    /// Each lease, by id.
    pub leases: Vec<LeaseUsage>,
}

/// What the leases of one group hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GroupUsage {
    /// What is stored, each page of each lease counted.
    pub stored: Bytes,
    /// RAM that the group's pages really take.
    pub taken: Bytes,
    /// What the group's leases together may store.
    pub promised: Bytes,
    /// The part of those leases that share.
    pub shared: SharedUsage,
}

/// What the sharing leases of one group hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SharedUsage {
    /// What is stored, each page of each lease counted, also of leases that were
    /// [left alone](crate::Finding::Unusable).
    pub stored: Bytes,
    /// RAM that the group's frames really take, with those (about 2 MiB at most) that are kept for the next writes.
    pub taken: Bytes,
    /// RAM saved: `stored` less the frames that hold it.
    pub saved: Bytes,
    /// Frames to which more than one page refers.
    pub shared_frames: u64,
    /// Copy-on-write breaks since the store was opened: writes that gave a page a frame other than the one it had, to
    /// which others go on referring. Pages that become holes are not counted.
    pub breaks: u64,
}

/// What one lease holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeaseUsage {
    /// The lease.
    pub id: LeaseId,
    /// Who uses it.
    pub borrower: HostName,
    /// Whom it is accounted to.
    pub group: Group,
    /// Whether it shares with its group.
    pub shared: bool,
    /// What it stores, whoever else stores the same.
    pub stored: Bytes,
    /// What it may store.
    pub quota: Bytes,
    /// Its size as an address space.
    pub capacity: Bytes,
}

impl Usage {
    /// Adds up `leases`, of which those that share have what is in `shared`.
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
