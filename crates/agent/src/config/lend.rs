//! Settings for lending.

use std::net::SocketAddr;
use std::time::Duration;

use aquifer_page::Bytes;
use serde::Deserialize;

use super::LimitsConfig;

/// Settings for lending.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LendConfig {
    /// Whether the agent lends at all.
    pub enabled: bool,
    /// M_r: memory kept for this host's own programs, VMs and caches, so that M_s = M_t - M_r
    /// (\[Ge23\], eq. 1). What they have counts against M_r first, and each byte once.
    /// `None` means M_s = M_t - M_u (eq. 2).
    pub reserved: Option<Bytes>,
    /// How long the agent keeps the lease of a silent borrower.
    #[serde(deserialize_with = "super::duration")]
    pub grace: Duration,
    /// The holder of the pages.
    pub backend: LeaseBackend,
    /// Address at which borrowers also reach their leases over NVMe/TCP; `None` for no NVMe. Pooled
    /// volumes encrypt their pages and nothing else. A kernel that attaches a lease itself encrypts
    /// nothing.
    pub nvme: Option<SocketAddr>,
    /// Whether RDMA serves leases, too, at the address `nvme`; only the kernel backend can.
    pub rdma: bool,
    /// Whether borrowers must authenticate with a lease's secret (DH-HMAC-CHAP, NVMe Base 2.0,
    /// section 8.13.5).
    pub secrets: bool,
    /// The part of the network link's speed that lending may use while this host's own programs use
    /// the link; 1.0 for all of it.
    pub network_share: f64,
    /// What one borrower may use.
    pub limits: LimitsConfig,
}

/// The holder of leases' pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LeaseBackend {
    /// The store: files on a tmpfs, which the agent serves.
    Store,
    /// zram devices, which the kernel's own NVMe target serves.
    Kernel,
}

impl Default for LendConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            reserved: None,
            grace: Duration::from_secs(600),
            backend: LeaseBackend::Store,
            nvme: None,
            rdma: false,
            secrets: true,
            network_share: 0.8,
            limits: LimitsConfig::default(),
        }
    }
}

impl LendConfig {
    pub(super) fn validate(&self, pages: SocketAddr) -> Result<(), String> {
        let Self { backend, nvme, rdma, .. } = *self;
        for (key, address) in [("pages", Some(pages)), ("[lend] nvme", nvme)] {
            if let Some(address) = address.filter(|address| address.ip().is_unspecified()) {
                return Err(format!(
                    "borrowers cannot reach {key} = \"{address}\": \
                     write an address of this host that they can reach"
                ));
            }
        }
        if backend == LeaseBackend::Kernel && nvme.is_none_or(|address| address.port() == 0) {
            return Err(
                "[lend] backend = \"kernel\" serves NVMe: set its address, as in nvme = \"IP:4420\""
                    .to_owned(),
            );
        }
        if rdma && backend != LeaseBackend::Kernel {
            return Err("[lend] rdma = true needs backend = \"kernel\"".to_owned());
        }
        if !(0.1..=1.0).contains(&self.network_share) {
            return Err(format!(
                "[lend] network_share = {} is not between 0.1 and 1.0: a share is a number such as \
                 0.8, and 1.0 sets no limit",
                self.network_share
            ));
        }
        self.limits.validate()?;
        if self.limits.is_set() && backend == LeaseBackend::Kernel {
            return Err(
                "[lend.limits] needs backend = \"store\": the kernel's target has no limits"
                    .to_owned(),
            );
        }
        Ok(())
    }
}
