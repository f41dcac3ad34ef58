//! Settings for borrowing.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use aquifer_blockdev::backend::BackendKind;
use aquifer_page::{Bytes, EXTENT_SIZE, Group, RegionName};
use serde::Deserialize;

/// Settings for borrowing.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BorrowConfig {
    /// Whether the agent borrows on its own; `aquifer host borrow` works in any case.
    pub enabled: bool,
    /// M_req: size of one request, at least one extent.
    pub request: Bytes,
    /// The most memory that the agent borrows on its own.
    pub max: Bytes,
    /// How many copies regions have of the pages that leave this host.
    pub protection: Protection,
    /// The same for the regions of these groups.
    pub protection_by_group: BTreeMap<Group, Protection>,
    /// The same for these regions, whatever their groups.
    pub protection_by_region: BTreeMap<RegionName, Protection>,
    /// How many copies the pages that this host swaps out have.
    pub protection_of_swap: Protection,
    /// Tenant to which lenders account the leases.
    pub group: Group,
    /// Directory of local files for pages that a lender recalls and no other lender has room
    /// for, and for copies of pages on the disk.
    pub spill: PathBuf,
    /// The age at which the key of a lease has been replaced, together with the lease; `None` for
    /// never.
    #[serde(deserialize_with = "super::duration_or_never")]
    pub key_lifetime: Option<Duration>,
    /// How long I/O waits for a lender that does not answer, at least 100 ms.
    #[serde(deserialize_with = "super::duration")]
    pub io_timeout: Duration,
    /// The way in which the host swaps to its leases.
    pub attach: Attach,
    /// The protocol by which pages travel.
    pub protocol: PageProtocol,
    /// The backend that attaches volumes to the kernel.
    pub backend: BackendKind,
    /// Swap priority of borrowed devices; -1 leaves it to the kernel.
    pub priority: i16,
}

/// How many copies the regions of a host have of the pages at lenders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Protection {
    /// One: the pages are lost with their lender.
    None,
    /// Two, on different lenders.
    Mirror,
    /// Two, on different lenders, while a lender has memory that nobody else needs. The second lags
    /// a moment behind.
    Opportunistic,
    /// Two: on a lender, and on this host's disk.
    Disk,
}

impl From<Protection> for aquifer_control::Protection {
    fn from(protection: Protection) -> Self {
        match protection {
            // Engines keep the copies on the disk: no lender is asked.
            Protection::None | Protection::Disk => Self::None,
            Protection::Mirror => Self::Mirror,
            Protection::Opportunistic => Self::Opportunistic,
        }
    }
}

impl BorrowConfig {
    /// Returns how many copies the region of a group has.
    pub fn protection_of(&self, region: &RegionName, group: &Group) -> Protection {
        let by_group = || self.protection_by_group.get(group);
        let own = self.protection_by_region.get(region).or_else(by_group);
        own.copied().unwrap_or(self.protection)
    }

    /// Returns the protection of each region, and of swap.
    pub fn protections(&self) -> aquifer_control::Protections {
        aquifer_control::Protections {
            default: self.protection.into(),
            groups: all(&self.protection_by_group),
            regions: all(&self.protection_by_region),
            swap: self.protection_of_swap.into(),
        }
    }
}

fn all<K: Ord + Clone>(
    named: &BTreeMap<K, Protection>,
) -> BTreeMap<K, aquifer_control::Protection> {
    named.iter().map(|(name, protection)| (name.clone(), (*protection).into())).collect()
}

/// The way in which a host swaps to its leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Attach {
    /// A volume over any number of leases, with a process that serves it and can move its extents.
    Pool,
    /// The kernel's own NVMe initiator to one lease, without a process.
    Direct,
}

/// The protocol by which pages travel between a borrower and its lenders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PageProtocol {
    /// NBD over mutual TLS.
    Nbd,
    /// NVMe/TCP, where only pooled volumes encrypt their pages; NBD if a lender has no NVMe.
    NvmeTcp,
    /// NVMe over RDMA, unencrypted; for direct attachment only.
    NvmeRdma,
}

impl Default for BorrowConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            request: Bytes::gib(1),
            max: Bytes::gib(16),
            protection: Protection::Opportunistic,
            protection_by_group: BTreeMap::new(),
            protection_by_region: BTreeMap::new(),
            protection_of_swap: Protection::None,
            group: Group::default(),
            spill: PathBuf::from("/var/lib/aquifer/spill"),
            key_lifetime: Some(Duration::from_secs(30 * 86_400)),
            io_timeout: Duration::from_secs(8),
            attach: Attach::Pool,
            protocol: PageProtocol::Nbd,
            backend: BackendKind::Auto,
            priority: 100,
        }
    }
}

impl BorrowConfig {
    pub(super) fn validate_amounts(&self) -> Result<(), String> {
        if self.request.0 < EXTENT_SIZE {
            return Err(format!(
                "[borrow] request = {} must be at least one extent, 64MiB",
                self.request
            ));
        }
        if self.max < self.request {
            let Self { max, request, .. } = self;
            return Err(format!("[borrow] max = {max} is less than a single request = {request}"));
        }
        if self.key_lifetime.is_some_and(|lifetime| lifetime < Duration::from_secs(1)) {
            return Err("[borrow] key_lifetime must be at least 1s, or \"never\"".to_owned());
        }
        if self.io_timeout < Duration::from_millis(100) {
            return Err("[borrow] io_timeout must be at least 100ms".to_owned());
        }
        Ok(())
    }

    pub(super) fn validate_swap(&self) -> Result<(), String> {
        match (self.protection_of_swap, self.attach) {
            (Protection::Disk, _) => {
                let why = "[borrow] protection_of_swap = \"disk\" would make swap as slow as this \
                           host's disk: use \"mirror\", \"opportunistic\" or \"none\"";
                Err(why.to_owned())
            }
            (Protection::Mirror | Protection::Opportunistic, Attach::Direct) => {
                let why = "[borrow] protection_of_swap needs attach = \"pool\": with \"direct\" \
                           the kernel writes each page to one lender";
                Err(why.to_owned())
            }
            _ => Ok(()),
        }
    }

    pub(super) fn validate_way(&self) -> Result<(), String> {
        match (self.attach, self.protocol) {
            (Attach::Direct, PageProtocol::Nbd) => {
                Err("[borrow] attach = \"direct\" needs protocol = \"nvme-tcp\" or \"nvme-rdma\""
                    .to_owned())
            }
            (Attach::Pool, PageProtocol::NvmeRdma) => {
                Err("[borrow] protocol = \"nvme-rdma\" needs attach = \"direct\"".to_owned())
            }
            _ => Ok(()),
        }
    }
}
