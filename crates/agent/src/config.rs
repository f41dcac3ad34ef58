//! The agent's configuration: a TOML file that is refused where it is not understood.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aquifer_control::balance;
use aquifer_device::backend::BackendKind;
use aquifer_page::{Bytes, EXTENT_SIZE, Group, HostName};
use serde::Deserialize;

/// Everything an agent is told. `aquifer init` writes a commented one.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The name of this host, as its certificate has it.
    pub host: HostName,
    /// Where peers call this agent (HTTP with mutual TLS).
    #[serde(default = "default_listen")]
    pub listen: SocketAddr,
    /// Where borrowers reach the pages of their leases (NBD with mutual TLS).
    #[serde(default = "default_pages")]
    pub pages: SocketAddr,
    /// The unix socket for the command line.
    #[serde(default = "default_socket")]
    pub socket: PathBuf,
    /// Control sockets and logs of volumes.
    #[serde(default = "default_state")]
    pub state: PathBuf,
    /// The tmpfs directory that holds the pages of leases.
    #[serde(default)]
    pub store: Option<PathBuf>,
    /// Directory with `ca.pem`, `host.pem` and `host.key`, made by `aquifer init`.
    #[serde(default = "default_tls")]
    pub tls: PathBuf,
    /// What memory the agent watches.
    #[serde(default)]
    pub memory: MemoryConfig,
    /// How it lends.
    #[serde(default)]
    pub lend: LendConfig,
    /// How it borrows.
    #[serde(default)]
    pub borrow: BorrowConfig,
    /// How it takes VMs.
    #[serde(default)]
    pub vms: VmsConfig,
    /// What it does for groups.
    #[serde(default)]
    pub groups: GroupsConfig,
    /// The other hosts.
    #[serde(default, rename = "peer")]
    pub peers: Vec<PeerConfig>,
}

/// What memory the agent watches, and when it acts.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MemoryConfig {
    /// A memory cgroup (v1 or v2) to manage instead of the whole host, as a path under `/sys/fs/cgroup`.
    pub cgroup: Option<PathBuf>,
    /// Keep that cgroup from swapping except while this agent has a borrowed device on. Swap devices belong to the whole
    /// kernel: without this the cgroup would also use those that agents of other cgroups borrowed.
    pub gate_swap: bool,
    /// The monitoring period.
    #[serde(deserialize_with = "duration")]
    pub period: Duration,
    /// T_upper: borrow above this share of M_t.
    pub upper: f64,
    /// T_lower: return when used memory and borrowed swap together are below this share of M_t.
    pub lower: f64,
    /// Share of time that tasks may wait for memory (PSI "some") before that counts as short of memory; 0 turns it off.
    pub pressure: f64,
}

/// How the agent lends.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LendConfig {
    /// Whether it lends at all.
    pub enabled: bool,
    /// M_r: kept for this host's own programs, so that M_s = M_t - M_r (eq. 1). Without it M_s = M_t - M_u (eq. 2).
    pub reserved: Option<Bytes>,
    /// How long the lease of a silent borrower is kept.
    #[serde(deserialize_with = "duration")]
    pub grace: Duration,
    /// What holds the pages.
    pub backend: LeaseBackend,
    /// Where borrowers reach their leases over NVMe/TCP too. Of what travels only pages are encrypted, and not those of a kernel that attaches a lease itself.
    pub nvme: Option<SocketAddr>,
    /// Over RDMA too, at the same address; by the kernel only.
    pub rdma: bool,
    /// Whether borrowers must prove by a secret of the lease that they are who they say (DH-HMAC-CHAP).
    pub secrets: bool,
}

/// What holds the pages of leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LeaseBackend {
    /// The store: files on a tmpfs, served by the agent.
    Store,
    /// zram devices, served by the kernel's own NVMe target.
    Kernel,
}

/// How the agent borrows.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BorrowConfig {
    /// Whether it borrows by itself (`aquifer borrow` works in any case).
    pub enabled: bool,
    /// M_req: how much is asked for at a time.
    pub request: Bytes,
    /// The most that is ever borrowed by itself.
    pub max: Bytes,
    /// The tenant to whom lenders account the leases.
    pub group: Group,
    /// Directory for the local file that takes pages which a lender wants back and no other has room for.
    pub spill: PathBuf,
    /// How long I/O waits for a lender that does not answer.
    #[serde(deserialize_with = "duration")]
    pub patience: Duration,
    /// By what a host swaps to its leases.
    pub attach: Attach,
    /// How pages travel.
    pub protocol: PageProtocol,
    /// How volumes are attached to the kernel.
    pub backend: BackendKind,
    /// Swap priority of borrowed devices; -1 leaves it to the kernel.
    pub priority: i16,
}

/// By what a host swaps to its leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Attach {
    /// A volume over any number of leases, served by a process, whose extents can move.
    Pool,
    /// The kernel's own NVMe initiator, straight to one lease, with no process on the way.
    Direct,
}

/// How pages travel between a borrower and its lenders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PageProtocol {
    /// NBD over mutual TLS.
    Nbd,
    /// NVMe/TCP, of which only pages are encrypted; NBD where a lender has no NVMe.
    NvmeTcp,
    /// NVMe over RDMA, not encrypted; direct only.
    NvmeRdma,
}

/// How the agent takes VMs that other hosts move here.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VmsConfig {
    /// Whether it takes any. Who may move a VM here may have QEMU do here what it likes.
    pub accept: bool,
    /// QEMU itself.
    pub qemu: PathBuf,
    /// Whether memory of this host is moved between its VMs, to where it is needed.
    pub balance: bool,
    /// How that is decided.
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

/// What the agent does for the groups of its host.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GroupsConfig {
    /// Where their agreements are.
    pub agreements: PathBuf,
    /// Whether it hands out what they save.
    pub balance: bool,
}

impl Default for GroupsConfig {
    fn default() -> Self {
        Self { agreements: "/etc/aquifer/groups".into(), balance: false }
    }
}

/// Another host.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerConfig {
    /// Its name, as its certificate has it.
    pub name: HostName,
    /// `HOST:PORT` of its agent.
    pub address: String,
}

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not TOML, or has keys or values that mean nothing here.
    #[error("the configuration {path} is wrong: {source}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// The values do not fit together.
    #[error("the configuration {path} is wrong: {why}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Which values, why, and what would be right.
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

    /// The tmpfs directory of leases: as configured, or `/dev/shm/aquifer/HOST`.
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
                "[memory] gate_swap = true needs a cgroup: name one, or leave it out".to_owned()
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
        if self.borrow.patience < millis(100) {
            return Err("[borrow] patience must be at least 100ms".to_owned());
        }
        let LendConfig { backend, nvme, rdma, .. } = self.lend;
        for (key, address) in [("pages", Some(self.pages)), ("[lend] nvme", nvme)] {
            if let Some(address) = address.filter(|address| address.ip().is_unspecified()) {
                return Err(format!(
                    "{key} = \"{address}\" is told to borrowers, who cannot call it: write the address of this host by which \
                     they reach it"
                ));
            }
        }
        if backend == LeaseBackend::Kernel && nvme.is_none_or(|address| address.port() == 0) {
            return Err(
                "[lend] backend = \"kernel\" serves NVMe: say where, by nvme = \"IP:4420\""
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
            patience: Duration::from_secs(8),
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
    fn what_is_not_understood_is_refused_by_name() {
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
            ("host = 'a'\npages = '0.0.0.0:7071'", "pages = \"0.0.0.0:7071\" is told to borrowers"),
            ("host = 'a'\n[lend]\nnvme = '[::]:4420'", "[lend] nvme"),
            ("host = 'a'\n[borrow]\nprotocol = 'nvme-rdma'", "needs attach"),
            ("host = 'a'\n[lend]\nbackend = 'kernel'", "say where"),
            ("host = 'a'\n[lend]\nbackend = 'kernel'\nnvme = '10.0.0.1:0'", "say where"),
            ("host = 'a'\n[lend]\nnvme = '10.0.0.1:4420'\nrdma = true", "needs backend"),
            ("host = 'a'\n[[peer]]\nname = 'a'\naddress = 'x:1'", "this host itself"),
            (
                "host = 'a'\n[[peer]]\nname = 'b'\naddress = 'x:1'\n[[peer]]\nname = 'b'\naddress = 'y:1'",
                "twice",
            ),
            ("host = 'a'\n[[peer]]\nname = 'b'\naddress = 'x'", "HOST:PORT"),
        ] {
            let error = refused(text);
            assert!(error.contains(named), "{text:?} gave {error:?}, which does not say {named:?}");
        }
    }
}
