use std::collections::BTreeMap;

use aquifer_page::{Bytes, Group, HostName, LeaseId};
use serde::Serialize;

use crate::Lease;

/// What a store holds, in all and for whom.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Usage {
    /// RAM taken by pages.
    pub stored: Bytes,
    /// RAM that all leases together may take.
    pub promised: Bytes,
    /// The same for each group.
    pub groups: BTreeMap<Group, GroupUsage>,
    /// Each lease, by id.
    pub leases: Vec<LeaseUsage>,
}

/// What the leases of one group hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GroupUsage {
    /// RAM taken by pages.
    pub stored: Bytes,
    /// RAM that the group's leases together may take.
    pub promised: Bytes,
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
    /// RAM taken by pages.
    pub stored: Bytes,
    /// RAM it may take.
    pub quota: Bytes,
    /// Its size as an address space.
    pub capacity: Bytes,
}

impl Usage {
    /// Adds up `leases`.
    pub(crate) fn of<'a>(leases: impl Iterator<Item = &'a Lease>) -> Self {
        let mut usage = Self::default();
        for lease in leases {
            let (stored, quota) = (lease.stored(), lease.quota());
            let group = usage.groups.entry(lease.group().clone()).or_default();
            group.stored += stored;
            group.promised += quota;
            usage.stored += stored;
            usage.promised += quota;
            usage.leases.push(LeaseUsage {
                id: lease.id(),
                borrower: lease.borrower().clone(),
                group: lease.group().clone(),
                stored,
                quota,
                capacity: lease.capacity(),
            });
        }
        usage
    }
}
