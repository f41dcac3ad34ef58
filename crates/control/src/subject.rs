//! The hosts, leases, volumes and VMs that a decision concerns.

use aquifer_page::{HostName, LeaseId, RegionName, VolumeId};
use serde::{Deserialize, Serialize};

use crate::What;

/// A thing that a decision concerns.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", content = "name", rename_all = "snake_case")]
pub enum Subject {
    /// Another host.
    Host(HostName),
    /// A lease, given or held.
    Lease(LeaseId),
    /// A volume of this host.
    Volume(VolumeId),
    /// A VM of this host.
    Vm(RegionName),
    /// A region, of this host or of the borrower.
    Region(RegionName),
}

impl What {
    /// Returns the other host, the lease, the volume and the region that the decision names.
    pub fn subjects(&self) -> Vec<Subject> {
        let region = match self {
            Self::Asks { owner, .. } | Self::Grants { owner, .. } | Self::Rejects { owner, .. } => {
                owner.region()
            }
            Self::Provides { region, .. }
            | Self::Lacks { region, .. }
            | Self::Unclaimed { region, .. }
            | Self::RegionGone { region, .. }
            | Self::MovedAway { region, .. }
            | Self::Arrived { region, .. } => Some(region),
            _ => None,
        };
        let region = region.cloned().map(Subject::Region);
        self.others().into_iter().chain(region).collect()
    }

    fn others(&self) -> Vec<Subject> {
        let (host, lease, volume) = match self {
            Self::RoleChanged { .. }
            | Self::NobodyLends { .. }
            | Self::Abandons { .. }
            | Self::BorrowRefused { .. } => (None, None, None),
            Self::Asks { lender: host, .. }
            | Self::GivesUp { lender: host, .. }
            | Self::Rejected { lender: host, .. }
            | Self::Refused { lender: host, .. }
            | Self::Rejects { borrower: host, .. } => (Some(host), None, None),
            Self::Got { lender: host, lease, .. }
            | Self::Unwanted { lender: host, lease }
            | Self::Finishes { lender: host, lease }
            | Self::FinDropped { lender: host, lease }
            | Self::Recalled { lender: host, lease, .. }
            | Self::Evacuates { lender: host, lease, .. }
            | Self::Evacuated { lender: host, lease }
            | Self::Copies { lender: host, of: lease, .. }
            | Self::CopyFailed { lender: host, lease, .. }
            | Self::LacksCopy { lender: host, lease, .. }
            | Self::KeepsKey { lender: host, lease, .. }
            | Self::Abandoned { lender: host, lease }
            | Self::EvacuationFailed { lender: host, lease, .. }
            | Self::Grants { borrower: host, lease, .. }
            | Self::OpenFailed { borrower: host, lease, .. }
            | Self::Recalls { borrower: host, lease, .. }
            | Self::Frees { borrower: host, lease, .. }
            | Self::Expires { borrower: host, lease, .. }
            | Self::Permits { to: host, lease, .. }
            | Self::PassesOn { to: host, lease, .. }
            | Self::Stranger { from: host, lease } => (Some(host), Some(lease), None),
            Self::RecordFailed { lease, .. } => (None, Some(lease), None),
            Self::MovedAway { to, volume, .. } => (Some(to), None, Some(volume)),
            Self::Activates { volume, .. }
            | Self::ActivationFailed { volume, .. }
            | Self::Deactivates { volume, .. }
            | Self::DeactivationFailed { volume, .. }
            | Self::Deactivated { volume, .. }
            | Self::Provides { volume, .. }
            | Self::Lacks { volume, .. }
            | Self::Unclaimed { volume, .. }
            | Self::RegionGone { volume, .. }
            | Self::Arrived { volume, .. } => (None, None, Some(volume)),
        };
        let host = host.cloned().map(Subject::Host);
        let lease = lease.copied().map(Subject::Lease);
        host.into_iter().chain(lease).chain(volume.copied().map(Subject::Volume)).collect()
    }

    /// Returns whether the ledger limited the decision.
    pub(crate) fn is_limited_by_ledger(&self) -> bool {
        matches!(self, Self::Grants { ledger: Some(_), .. } | Self::Rejects { ledger: Some(_), .. })
    }
}
