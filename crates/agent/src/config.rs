//! The agent's configuration: a TOML file, refused if it has unknown keys or invalid values.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aquifer_blockdev::backend::BackendKind;
use aquifer_control::balance;
use aquifer_page::{Bytes, EXTENT_SIZE, Group, HostName};
use serde::Deserialize;

/// The agent's whole configuration. `aquifer cluster init` writes a commented example.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Name of this host, as in its certificate.
    pub host: HostName,
    /// Address at which peers call this agent (HTTP with mutual TLS).
    #[serde(default = "default_listen")]
    pub listen: SocketAddr,
    /// Address at which borrowers reach the pages of their leases (NBD with mutual TLS).
    #[serde(default = "default_pages")]
    pub pages: SocketAddr,
    /// Unix socket for the command line.
    #[serde(default = "default_socket")]
    pub socket: PathBuf,
    /// Directory of control sockets, records and logs.
    #[serde(default = "default_state")]
    pub state: PathBuf,
    /// Directory on a tmpfs for the pages of leases; `None` means `/dev/shm/aquifer/HOST`.
    #[serde(default)]
    pub store: Option<PathBuf>,
    /// Directory with `ca.pem`, `host.pem` and `host.key`, which `aquifer cluster init` writes.
    #[serde(default = "default_tls")]
    pub tls: PathBuf,
    /// Settings for watching memory.
    #[serde(default)]
    pub memory: MemoryConfig,
    /// Settings for lending.
    #[serde(default)]
    pub lend: LendConfig,
    /// Settings for borrowing.
    #[serde(default)]
    pub borrow: BorrowConfig,
    /// Settings for VMs.
    #[serde(default)]
    pub vms: VmsConfig,
    /// Settings for groups.
    #[serde(default)]
    pub groups: GroupsConfig,
    /// The other hosts.
    #[serde(default, rename = "peer")]
    pub peers: Vec<PeerConfig>,
}

/// The memory that the agent watches, and the thresholds at which it acts.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MemoryConfig {
    /// Memory cgroup (v1 or v2) to manage instead of the whole host, as a path under
    /// `/sys/fs/cgroup`.
    pub cgroup: Option<PathBuf>,
    /// Whether that cgroup may swap only while this agent has a borrowed device on. Swap devices
    /// belong to the whole kernel: without this, the cgroup also uses devices that agents of other
    /// cgroups borrowed.
    pub gate_swap: bool,
    /// Monitoring period, 50 ms to 1 min.
    #[serde(deserialize_with = "duration")]
    pub period: Duration,
    /// T_upper: the agent borrows above this share of M_t.
    pub upper: f64,
    /// T_lower: the agent returns memory if used memory plus borrowed swap is below this share of
    /// M_t.
    pub lower: f64,
    /// Share of time that tasks may wait for memory (PSI "some") before memory counts as short; 0
    /// turns the check off.
    pub pressure: f64,
}

/// Settings for lending.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LendConfig {
    /// Whether the agent lends at all.
    pub enabled: bool,
    /// M_r: memory kept for this host's own programs, so that M_s = M_t - M_r (\[Ge23\], eq. 1).
    /// `None` means M_s = M_t - M_u (eq. 2).
    pub reserved: Option<Bytes>,
    /// How long the agent keeps the lease of a silent borrower.
    #[serde(deserialize_with = "duration")]
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
    /// Tenant to which lenders account the leases.
    pub group: Group,
    /// Directory of the local file for pages that a lender recalls and no other lender has room
    /// for.
    pub spill: PathBuf,
    /// How long I/O waits for a lender that does not answer, at least 100 ms.
    #[serde(deserialize_with = "duration")]
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

/// Settings for VMs: taking them from other hosts, and balancing their memory.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VmsConfig {
    /// Whether the agent takes VMs. A peer that moves a VM here controls a QEMU process on this
    /// host.
    pub accept: bool,
    /// QEMU's program, by name or path.
    pub qemu: PathBuf,
    /// Whether the agent moves memory between this host's VMs to those that need it.
    pub balance: bool,
    /// Settings of that balancer.
    pub balancer: balance::Config,
}

impl Default for VmsConfig {
    fn default() -> Self {
        Self {
            accept: false,
            qemu: "qemu-system-x86_64".into(),
            balance: false,
            balancer: balance::Config::default(),
        }
    }
}

/// Settings for the groups of this host.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GroupsConfig {
    /// Directory of the groups' agreements.
    pub agreements: PathBuf,
    /// Whether the agent hands out the memory that groups save.
    pub balance: bool,
}

impl Default for GroupsConfig {
    fn default() -> Self {
        Self { agreements: "/etc/aquifer/groups".into(), balance: false }
    }
}

/// A peer.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerConfig {
    /// Name of the peer, as in its certificate.
    pub name: HostName,
    /// `HOST:PORT` of the peer's agent.
    pub address: String,
}

/// The reasons to refuse a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {path}: {source}")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The file is not TOML, or has unknown keys or values.
    #[error("the configuration {path} is invalid: {source}")]
    Parse {
        /// Path of the file.
        path: PathBuf,
        /// Position and cause.
        source: Box<toml::de::Error>,
    },
    /// A value is out of range, or values contradict each other.
    #[error("the configuration {path} is invalid: {why}")]
    Invalid {
        /// Path of the file.
        path: PathBuf,
        /// The values, the conflict and the remedy.
        why: String,
    },
}

impl Config {
    /// Reads and checks the configuration at `path`.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(&text).map_err(|error| match error {
            Wrong::Parse(source) => ConfigError::Parse { path: path.to_owned(), source },
            Wrong::Invalid(why) => ConfigError::Invalid { path: path.to_owned(), why },
        })
    }

    fn parse(text: &str) -> Result<Self, Wrong> {
        let config: Self = toml::from_str(text).map_err(|error| Wrong::Parse(Box::new(error)))?;
        config.validate().map_err(Wrong::Invalid)?;
        Ok(config)
    }

    /// Returns the tmpfs directory of leases: the configured one, or `/dev/shm/aquifer/HOST`.
    pub fn store_dir(&self) -> PathBuf {
        self.store.clone().unwrap_or_else(|| Path::new("/dev/shm/aquifer").join(self.host.as_str()))
    }

    fn validate(&self) -> Result<(), String> {
        let MemoryConfig { upper, lower, pressure, period, .. } = self.memory;
        if !(0.0 < lower && lower < upper && upper < 1.0) {
            return Err(format!(
                "[memory] lower = {lower} and upper = {upper} must be 0 < lower < upper < 1"
            ));
        }
        if self.memory.gate_swap && self.memory.cgroup.is_none() {
            return Err(
                "[memory] gate_swap = true needs a cgroup: set one, or remove gate_swap".to_owned()
            );
        }
        if !(0.0..1.0).contains(&pressure) {
            return Err(format!(
                "[memory] pressure = {pressure} must be a share of time from 0 (off) to below 1"
            ));
        }
        let millis = Duration::from_millis;
        if !(millis(50)..=millis(60_000)).contains(&period) {
            return Err(format!(
                "[memory] period = {} must be between 50ms and 1m",
                humantime::format_duration(period)
            ));
        }
        self.vms.balancer.validate().map_err(|error| format!("[vms.balancer] {error}"))?;
        if self.borrow.request.0 < EXTENT_SIZE {
            return Err(format!(
                "[borrow] request = {} must be at least one extent, 64MiB",
                self.borrow.request
            ));
        }
        if self.borrow.max < self.borrow.request {
            let BorrowConfig { max, request, .. } = &self.borrow;
            return Err(format!("[borrow] max = {max} is less than a single request = {request}"));
        }
        if self.borrow.io_timeout < millis(100) {
            return Err("[borrow] io_timeout must be at least 100ms".to_owned());
        }
        let LendConfig { backend, nvme, rdma, .. } = self.lend;
        for (key, address) in [("pages", Some(self.pages)), ("[lend] nvme", nvme)] {
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
        match (self.borrow.attach, self.borrow.protocol) {
            (Attach::Direct, PageProtocol::Nbd) => {
                return Err(
                    "[borrow] attach = \"direct\" needs protocol = \"nvme-tcp\" or \"nvme-rdma\""
                        .to_owned(),
                );
            }
            (Attach::Pool, PageProtocol::NvmeRdma) => {
                return Err(
                    "[borrow] protocol = \"nvme-rdma\" needs attach = \"direct\"".to_owned()
                );
            }
            _ => {}
        }
        let mut seen = BTreeSet::from([&self.host]);
        for peer in &self.peers {
            if !seen.insert(&peer.name) {
                let name = &peer.name;
                let what =
                    if *name == self.host { "is this host itself" } else { "is listed twice" };
                return Err(format!("[[peer]] {name} {what}"));
            }
            if peer.address.rsplit_once(':').is_none_or(|(_, port)| port.parse::<u16>().is_err()) {
                return Err(format!(
                    "[[peer]] {}: address '{}' must be HOST:PORT",
                    peer.name, peer.address
                ));
            }
        }
        Ok(())
    }
}

enum Wrong {
    Parse(Box<toml::de::Error>),
    Invalid(String),
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            cgroup: None,
            gate_swap: false,
            period: Duration::from_secs(1),
            upper: 0.8,
            lower: 0.6,
            pressure: 0.1,
        }
    }
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
        }
    }
}

impl Default for BorrowConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            request: Bytes::gib(1),
            max: Bytes::gib(16),
            group: Group::default(),
            spill: PathBuf::from("/var/lib/aquifer/spill"),
            io_timeout: Duration::from_secs(8),
            attach: Attach::Pool,
            protocol: PageProtocol::Nbd,
            backend: BackendKind::Auto,
            priority: 100,
        }
    }
}

fn default_listen() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 7070))
}

fn default_pages() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 7071))
}

fn default_socket() -> PathBuf {
    "/run/aquifer/agent.sock".into()
}

fn default_state() -> PathBuf {
    "/run/aquifer".into()
}

fn default_tls() -> PathBuf {
    "/etc/aquifer/tls".into()
}

fn duration<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    humantime::parse_duration(&text).map_err(|error| {
        serde::de::Error::custom(format!(
            "'{text}' is not a time ({error}); write for example \"250ms\" or \"10m\""
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        match Config::parse(text) {
            Ok(config) => panic!("accepted {config:?}"),
            Err(Wrong::Parse(error)) => error.to_string(),
            Err(Wrong::Invalid(why)) => why,
        }
    }

    #[test]
    fn a_host_name_is_all_that_is_needed() {
        let Ok(config) = Config::parse("host = 'a'") else { panic!("refused") };
        assert!(
            config.listen.ip().is_loopback() && config.pages.ip().is_loopback(),
            "loopback by default"
        );
        assert_eq!(config.store_dir(), Path::new("/dev/shm/aquifer/a"));
    }

    #[test]
    fn unknown_settings_are_refused_by_name() {
        for (text, named) in [
            ("", "host"),
            ("host = 'a b'", "'a b' cannot be a host name"),
            ("host = 'a'\nlisten_on = 'x'", "listen_on"),
            ("host = 'a'\n[memory]\nuper = 0.9", "uper"),
            ("host = 'a'\n[memory]\nupper = 0.5", "lower = 0.6 and upper = 0.5"),
            ("host = 'a'\n[memory]\nperiod = 'often'", "'often' is not a time"),
            ("host = 'a'\n[memory]\nperiod = '1ms'", "between 50ms and 1m"),
            ("host = 'a'\n[memory]\ngate_swap = true", "needs a cgroup"),
            ("host = 'a'\n[memory]\npressure = 2.0", "pressure = 2"),
            ("host = 'a'\n[borrow]\nrequest = '1 parsec'", "'1 parsec' is not a size"),
            ("host = 'a'\n[borrow]\nrequest = '1M'", "at least one extent"),
            ("host = 'a'\n[borrow]\nmax = '64M'", "less than a single request"),
            ("host = 'a'\n[borrow]\nbackend = 'floppy'", "floppy"),
            ("host = 'a'\n[borrow]\nattach = 'direct'", "needs protocol"),
            ("host = 'a'\npages = '0.0.0.0:7071'", "cannot reach pages = \"0.0.0.0:7071\""),
            ("host = 'a'\n[lend]\nnvme = '[::]:4420'", "[lend] nvme"),
            ("host = 'a'\n[borrow]\nprotocol = 'nvme-rdma'", "needs attach"),
            ("host = 'a'\n[lend]\nbackend = 'kernel'", "set its address"),
            ("host = 'a'\n[lend]\nbackend = 'kernel'\nnvme = '10.0.0.1:0'", "set its address"),
            ("host = 'a'\n[lend]\nnvme = '10.0.0.1:4420'\nrdma = true", "needs backend"),
            ("host = 'a'\n[[peer]]\nname = 'a'\naddress = 'x:1'", "this host itself"),
            (
                "host = 'a'\n[[peer]]\nname = 'b'\naddress = 'x:1'\n\
                 [[peer]]\nname = 'b'\naddress = 'y:1'",
                "twice",
            ),
            ("host = 'a'\n[[peer]]\nname = 'b'\naddress = 'x'", "HOST:PORT"),
        ] {
            let error = refused(text);
            assert!(error.contains(named), "{text:?} gave {error:?}, which does not say {named:?}");
        }
    }
}
