//! The agent's configuration: a TOML file, refused if it has unknown keys or invalid values.

mod access;
mod borrow;
mod certificates;
mod lend;
mod limits;
mod memory;
mod tenants;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aquifer_page::{HostName, Zone};
use serde::Deserialize;

pub use access::AccessConfig;
pub use borrow::{Attach, BorrowConfig, PageProtocol, Protection};
pub use certificates::CertificatesConfig;
pub use lend::{LeaseBackend, LendConfig};
pub use limits::LimitsConfig;
pub use memory::MemoryConfig;
pub use tenants::{GroupsConfig, VmsConfig};

/// The agent's whole configuration. `aquifer cluster create` and `join` write a commented example.
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
    /// Directory with `ca.pem`, `host.pem` and `host.key`, which `aquifer cluster join` writes.
    #[serde(default = "default_tls")]
    pub tls: PathBuf,
    /// Directory of what this host knows of its cluster, which `aquifer cluster join` writes.
    #[serde(default = "default_cluster")]
    pub cluster: PathBuf,
    /// The zone that this host is in: hosts of one zone may fail together.
    #[serde(default)]
    pub zone: Option<Zone>,
    /// The people besides root that may use the agent's socket.
    #[serde(default)]
    pub access: AccessConfig,
    /// Settings for the certificates that this host signs.
    #[serde(default)]
    pub certificates: CertificatesConfig,
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
        self.memory.validate()?;
        self.certificates.validate()?;
        self.vms.balancer.validate().map_err(|error| format!("[vms.balancer] {error}"))?;
        self.borrow.validate_amounts()?;
        self.lend.validate(self.pages)?;
        self.borrow.validate_way()?;
        self.borrow.validate_swap()?;
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

fn default_cluster() -> PathBuf {
    "/var/lib/aquifer/cluster".into()
}

fn duration<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    humantime::parse_duration(&text).map_err(|error| {
        serde::de::Error::custom(format!(
            "'{text}' is not a time ({error}); write for example \"250ms\" or \"10m\""
        ))
    })
}

/// Reads a time, or the word `never`.
fn duration_or_never<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Duration>, D::Error> {
    let text = String::deserialize(deserializer)?;
    if text == "never" {
        return Ok(None);
    }
    humantime::parse_duration(&text).map(Some).map_err(|error| {
        serde::de::Error::custom(format!(
            "'{text}' is not a time ({error}); write for example \"5m\", or \"never\""
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
            ("host = 'a'\n[borrow]\nkey_lifetime = '0s'", "at least 1s, or \"never\""),
            ("host = 'a'\n[borrow]\nkey_lifetime = '0'", "or \"never\""),
            ("host = 'a'\n[borrow]\nattach = 'direct'", "needs protocol"),
            ("host = 'a'\n[borrow]\nprotection_of_swap = 'disk'", "as slow as this host's disk"),
            (
                "host = 'a'\n[borrow]\nattach = 'direct'\nprotocol = 'nvme-tcp'\n\
                 protection_of_swap = 'mirror'",
                "protection_of_swap needs attach = \"pool\"",
            ),
            ("host = 'a'\npages = '0.0.0.0:7071'", "cannot reach pages = \"0.0.0.0:7071\""),
            ("host = 'a'\n[lend]\nnvme = '[::]:4420'", "[lend] nvme"),
            ("host = 'a'\n[borrow]\nprotocol = 'nvme-rdma'", "needs attach"),
            ("host = 'a'\n[lend]\nbackend = 'kernel'", "set its address"),
            ("host = 'a'\n[lend.limits]\nhost_bytes = '4K'", "host_bytes = 4KiB is too low"),
            ("host = 'a'\n[lend.limits]\nlease_requests = 0", "lease_requests = 0 is too low"),
            ("host = 'a'\n[lend.limits]\nhost_connection = 9", "host_connection"),
            (
                "host = 'a'\n[lend]\nbackend = 'kernel'\nnvme = '10.0.0.1:4420'\n\
                 [lend.limits]\nhost_bytes = '1G'",
                "the kernel's target has no limits",
            ),
            ("host = 'a'\n[lend]\nnetwork_share = 0", "network_share = 0"),
            ("host = 'a'\n[lend]\nnetwork_share = 80", "a share is a number such as 0.8"),
            ("host = 'a'\n[lend]\nbackend = 'kernel'\nnvme = '10.0.0.1:0'", "set its address"),
            ("host = 'a'\n[lend]\nnvme = '10.0.0.1:4420'\nrdma = true", "needs backend"),
            (
                "host = 'a'\n[certificates]\nlifetime = '9s'",
                "between 1h and 30days; with for_drills",
            ),
            ("host = 'a'\n[certificates]\nlifetime = '1y'", "must be between 1h and 30days"),
            (
                "host = 'a'\n[certificates]\nlifetime = '1s'\nfor_drills = true",
                "must be between 5s and 30days",
            ),
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
