//! This host in `aquifer cluster create` and `join`: its name, its address and its files.

use std::fs::{self, DirBuilder, File};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use aquifer_agent::cluster::ClusterDir;
use aquifer_agent::config::Config;
use aquifer_page::file::replace_durably;
use aquifer_page::{HostName, Zone};
use aquifer_transport::tls::HOST_CERTIFICATE;
use clap::Args;

use crate::commands::serve::CONFIG;
use crate::failure::{Failure, OrFail, Result};
use crate::init::{AGENT_PORT, template};

/// The default of --cluster-dir.
const CLUSTER: &str = "/var/lib/aquifer/cluster";

/// Options about this host.
#[derive(Debug, Args)]
pub(super) struct Own {
    /// Name of this host in the cluster
    ///
    /// The default is the name in the configuration, else that of the system.
    #[arg(long, value_name = "NAME")]
    host: Option<HostName>,
    /// Address at which the other hosts reach this one
    ///
    /// The default is the address in the configuration, else the one from which this host reaches
    /// the others.
    #[arg(long, value_name = "IP")]
    address: Option<IpAddr>,
    /// Zone that this host is in, such as its rack
    ///
    /// Hosts of one zone may fail together.
    #[arg(long, value_name = "NAME")]
    zone: Option<Zone>,
    /// Accept VMs that other hosts migrate here
    ///
    /// Those hosts choose QEMU's arguments, and so have the rights of root here.
    #[arg(long)]
    accept_vms: bool,
    /// Configuration file of the agent, created if missing
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    config: PathBuf,
    /// Directory for the cluster's key and hosts
    ///
    /// It must survive a reboot. An existing configuration names it.
    #[arg(long, value_name = "DIR", default_value = CLUSTER)]
    cluster_dir: PathBuf,
}

/// This host, ready to belong to a cluster.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) name: HostName,
    /// The address of its agent.
    pub(super) address: SocketAddr,
    pub(super) cluster: ClusterDir,
    pub(super) tls: PathBuf,
    pub(super) config: PathBuf,
    pub(super) config_is_new: bool,
    zone: Option<Zone>,
    accept_vms: bool,
}

impl Own {
    /// Finds out name, address and places, and changes nothing. `towards` is an address that this
    /// host must reach.
    pub(super) fn host(self, what: &str, towards: SocketAddr) -> Result<Host> {
        if self.config.exists() {
            let config = Config::load(&self.config).or_fail(|| what)?;
            return self.agree(what, &config)?.refuse_foreign_address(what);
        }
        let Self { host, address, zone, accept_vms, config: path, cluster_dir } = self;
        let absolute = |path: &Path| std::path::absolute(path).or_fail(|| what);
        let name = host.map_or_else(|| system_name(what), Ok)?;
        let ip = address.or_else(|| route_to(towards)).ok_or_else(|| {
            Failure::new(what, "this host has no address that the others could reach")
                .help("name it with --address")
        })?;
        let etc = path.parent().unwrap_or(Path::new("."));
        let host = Host {
            name,
            address: SocketAddr::from((ip, AGENT_PORT)),
            cluster: ClusterDir::new(absolute(&cluster_dir)?),
            tls: absolute(&etc.join("tls"))?,
            config: absolute(&path)?,
            config_is_new: true,
            zone,
            accept_vms,
        };
        host.refuse_foreign_address(what)
    }

    /// Takes all from an existing configuration, which no option may contradict.
    fn agree(&self, what: &str, config: &Config) -> Result<Host> {
        let differs = |option: &str, here: String| {
            let why = format!("{} says {here}", self.config.display());
            let help = format!("leave {option} out, or change that file");
            Err(Failure::new(what, why).help(help))
        };
        if self.host.as_ref().is_some_and(|host| *host != config.host) {
            return differs("--host", format!("host = \"{}\"", config.host));
        }
        if self.address.is_some_and(|address| address != config.listen.ip()) {
            return differs("--address", format!("listen = \"{}\"", config.listen));
        }
        if self.zone.is_some() && self.zone != config.zone {
            let zone = config
                .zone
                .as_ref()
                .map_or("no zone".to_owned(), |zone| format!("zone = \"{zone}\""));
            return differs("--zone", zone);
        }
        if self.accept_vms && !config.vms.accept {
            return differs("--accept-vms", "accept = false under [vms]".to_owned());
        }
        Ok(Host {
            name: config.host.clone(),
            address: config.listen,
            cluster: ClusterDir::new(config.cluster.clone()),
            tls: config.tls.clone(),
            config: self.config.clone(),
            config_is_new: false,
            zone: config.zone.clone(),
            accept_vms: config.vms.accept,
        })
    }
}

impl Host {
    /// Refuses an address at which the others cannot reach this host.
    fn refuse_foreign_address(self, what: &str) -> Result<Self> {
        let ip = self.address.ip();
        let is_own = !ip.is_unspecified() && !ip.is_multicast() && UdpSocket::bind((ip, 0)).is_ok();
        if is_own {
            return Ok(self);
        }
        let why = format!("{ip} is not an address of this host");
        let help = match self.config_is_new {
            true => "name one of its addresses with --address".to_owned(),
            false => format!("change 'listen' in {}", self.config.display()),
        };
        Err(Failure::new(what, why).help(help))
    }

    /// Locks the files of the cluster against other commands, for as long as the file lives.
    /// Refuses a host that belongs to a cluster.
    pub(super) fn lock(&self, what: &str) -> Result<File> {
        let locked = self.cluster.lock().or_fail(|| what)?;
        let certificate = self.tls.join(HOST_CERTIFICATE);
        if certificate.exists() {
            let why = format!("this host belongs to a cluster: {} exists", certificate.display());
            return Err(Failure::new(what, why).help("run 'aquifer cluster leave' first"));
        }
        Ok(locked)
    }

    /// Writes the configuration, if there was none.
    pub(super) fn configure(&self) -> Result<()> {
        if !self.config_is_new {
            return Ok(());
        }
        let path = |path: &Path| toml::Value::from(path.display().to_string());
        let mut keys = vec![("tls", path(&self.tls)), ("cluster", path(self.cluster.path()))];
        if let Some(zone) = &self.zone {
            keys.push(("zone", zone.to_string().into()));
        }
        if self.accept_vms {
            keys.push(("accept", true.into()));
        }
        let text = template::of_cluster(&self.name, self.address.ip(), &keys);
        let dir = self.config.parent().unwrap_or(Path::new("."));
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(dir)
            .and_then(|()| replace_durably(&self.config, text.as_bytes()))
            .or_fail(|| format!("writing {}", self.config.display()))
    }

    /// Returns the command that starts the agent.
    pub(super) fn start(&self) -> String {
        match self.config == Path::new(CONFIG) {
            true => "aquifer serve agent".to_owned(),
            false => format!("aquifer serve agent --config {}", self.config.display()),
        }
    }
}

fn system_name(what: &str) -> Result<HostName> {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    name.parse().map_err(|error| {
        Failure::new(what, error).help("name this host with --host: the system's name does not fit")
    })
}

/// Returns the address from which this host would send to another. Nothing is sent.
fn route_to(other: SocketAddr) -> Option<IpAddr> {
    let any = if other.is_ipv4() {
        IpAddr::from(Ipv4Addr::UNSPECIFIED)
    } else {
        IpAddr::from(Ipv6Addr::UNSPECIFIED)
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(other).ok()?;
    socket.local_addr().ok().map(|local| local.ip())
}

/// Makes a directory of secrets.
pub(super) fn secret_dir(dir: &Path) -> Result<()> {
    let what = || format!("creating {}", dir.display());
    if fs::metadata(dir).is_ok_and(|found| found.is_dir()) {
        return Ok(());
    }
    DirBuilder::new().recursive(true).mode(0o700).create(dir).or_fail(what)
}
