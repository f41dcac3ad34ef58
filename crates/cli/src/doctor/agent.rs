//! The checks of an agent's configuration: they look at all that it names, and change nothing.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use aquifer_agent::cluster::describe;
use aquifer_agent::config::{Attach, Config, LeaseBackend};
use aquifer_agent::monitor::Source;
use aquifer_agent::monitor::gate::SwapGate;
use aquifer_api::status::{Certificate, CertificateState};
use aquifer_blockdev::backend;
use aquifer_group::Agreements;
use aquifer_transport::tls::{HOST_CERTIFICATE, Identity};
use rustix::fs::{Access, access};

use super::Check;
use super::memory::TMPFS_MAGIC;
use super::qemu::find;

/// Returns one check for each thing that a configuration names.
pub fn checks(config: &Config) -> Vec<Check> {
    let mut checks = vec![certificate(config), memory(config)];
    checks.extend(addresses(config));
    checks.extend([
        directory("socket", config.socket.parent()),
        directory("state", Some(&config.state)),
    ]);
    if config.lend.backend == LeaseBackend::Store {
        checks.push(store(config));
    }
    if config.borrow.attach == Attach::Pool {
        checks.extend([spill(&config.borrow.spill), device(config)]);
    }
    checks.push(peers(config));
    if config.vms.accept {
        checks.push(qemu(&config.vms.qemu));
    }
    checks.push(groups(config));
    checks
}

/// Returns an essential fault: with it an agent does not start, or cannot do its work.
fn fault(name: &str, found: impl Display, help: impl Into<String>) -> Check {
    Check::missing(name, found.to_string(), help).essential()
}

/// Checks the certificate of a host that has one.
pub(super) fn certificate_if_any(config: &Config) -> Option<Check> {
    config.tls.join(HOST_CERTIFICATE).exists().then(|| certificate(config))
}

fn certificate(config: &Config) -> Check {
    const NAME: &str = "certificate";
    const HELP: &str =
        "get one with 'aquifer cluster join'; a file that is there already must go first";
    let checked = Identity::load(&config.tls).and_then(|identity| {
        let described = describe(&identity.validity(), SystemTime::now(), None);
        if described.state == CertificateState::Good || described.state == CertificateState::Ending
        {
            Identity::verify_own(&config.tls)?;
        }
        Ok((identity, described))
    });
    let (checked, described) = match checked {
        Ok((identity, described)) => (Ok(identity), Some(described)),
        Err(error) => (Err(error), None),
    };
    if let Some(check) = described.as_ref().and_then(|described| expiry(NAME, described)) {
        return check;
    }
    let left = described.map_or_else(String::new, |described| described.left());
    match checked {
        Err(error) => fault(NAME, error, HELP),
        Ok(identity) if *identity.host() != config.host => {
            let found = format!(
                "{} holds the certificate of '{}', but the configuration is for '{}'",
                config.tls.display(),
                identity.host(),
                config.host
            );
            fault(NAME, found, HELP)
        }
        Ok(identity) => {
            let found = format!(
                "of {}, with its key, {left}, issued by the authority in {}",
                identity.host(),
                config.tls.display()
            );
            Check::ok(NAME, found)
        }
    }
}

/// Says that the certificate ends soon, or has ended; `None` if it is good.
fn expiry(name: &str, certificate: &Certificate) -> Option<Check> {
    const SIGNER: &str = "see with 'aquifer cluster status' that a host that admits others is up; \
                          its agent renews the certificate when both agents run: \
                          'aquifer serve agent'";
    let days = certificate.lifetime_s / 86_400;
    match certificate.state {
        CertificateState::Good => None,
        CertificateState::Early => {
            let found = "it does not hold yet: the clock of this host or of the signer was wrong";
            Some(fault(name, found, format!("set the clocks right; {SIGNER}")))
        }
        CertificateState::Ending => {
            let found = format!("{} of {days} days: no signer renews it", certificate.left());
            Some(Check::warn(name, found, SIGNER))
        }
        CertificateState::Ended => {
            let found = "it has ended: no other host accepts it until a signer has renewed it";
            Some(fault(name, found, SIGNER))
        }
        CertificateState::Lost => {
            let found = "it ended more than 30 days ago: no signer renews it";
            let help = "check the clock of this host first; if it is right, run 'aquifer cluster \
                        leave --force', and 'aquifer cluster join' with a token that 'aquifer \
                        cluster token' prints on a signer";
            Some(fault(name, found, help))
        }
    }
}

fn memory(config: &Config) -> Check {
    const NAME: &str = "memory";
    let cgroup = config.memory.cgroup.as_deref();
    let read = Source::open(cgroup).and_then(|source| {
        cgroup.filter(|_| config.memory.gate_swap).map(SwapGate::new).transpose()?;
        source.read().map(|reading| (source.name(), reading))
    });
    match read {
        Ok((name, reading)) => {
            Check::ok(NAME, format!("of {name}: {} of {} used", reading.used, reading.total))
        }
        Err(error) => fault(
            NAME,
            error,
            "set memory.cgroup to an existing memory cgroup, or remove the setting",
        ),
    }
}

/// Checks the listening addresses; an address in use is no fault while an agent runs.
fn addresses(config: &Config) -> Vec<Check> {
    let is_running = UnixStream::connect(&config.socket).is_ok();
    let store = config.lend.backend == LeaseBackend::Store;
    let pages = store.then_some(("pages", config.pages));
    // The kernel's own target may still listen there, for leases of an earlier agent.
    let nvme = config.lend.nvme.filter(|_| store).map(|at| ("lend.nvme", at));
    let all = [Some(("listen", config.listen)), pages, nvme];
    let mut seen = BTreeMap::new();
    all.into_iter()
        .flatten()
        .map(|(key, at)| {
            let other = if at.port() == 0 { None } else { seen.insert(at, key) };
            other.map_or_else(
                || address(key, at, is_running),
                |other| {
                    fault(
                        key,
                        format!("{at} is also the address of {other}"),
                        "give each its own port",
                    )
                },
            )
        })
        .collect()
}

fn address(key: &str, at: SocketAddr, is_running: bool) -> Check {
    match TcpListener::bind(at) {
        Ok(_) => Check::ok(key, format!("{at} is free")),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse && is_running => {
            Check::ok(key, format!("{at} is in use, and an agent runs here"))
        }
        Err(error) => fault(
            key,
            format!("the agent cannot listen on {at}: {error}"),
            "use an address of this host and a free port",
        ),
    }
}

/// Returns the path itself, or its nearest ancestor that exists.
fn nearest(path: &Path) -> PathBuf {
    path.ancestors().find(|path| path.exists()).map_or_else(|| PathBuf::from("/"), Path::to_owned)
}

/// Returns why no files can be made in a directory, which may not exist yet.
fn unwritable(path: &Path) -> Option<String> {
    let nearest = nearest(path);
    if !nearest.is_dir() {
        return Some(format!("{} is not a directory", nearest.display()));
    }
    let refused = access(&nearest, Access::WRITE_OK | Access::EXEC_OK).err();
    refused.map(|error| format!("cannot write to {}: {error}", nearest.display()))
}

fn directory(key: &str, path: Option<&Path>) -> Check {
    let path = path.filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match unwritable(path) {
        Some(why) => fault(key, why, "run as root, or name another directory"),
        None if path.exists() => Check::ok(key, format!("{} is writable", path.display())),
        None => Check::ok(key, format!("the agent creates {} when it starts", path.display())),
    }
}

fn store(config: &Config) -> Check {
    const NAME: &str = "store";
    const HELP: &str = "set store to a directory on a tmpfs, or remove the setting";
    let dir = config.store_dir();
    if let Some(why) = unwritable(&dir) {
        return fault(NAME, why, HELP);
    }
    let on = nearest(&dir);
    match rustix::fs::statfs(&on) {
        Err(error) => fault(NAME, format!("cannot examine {}: {error}", on.display()), HELP),
        Ok(fs) if fs.f_type == TMPFS_MAGIC => {
            Check::ok(NAME, format!("{} is on a tmpfs", dir.display()))
        }
        // Without a `store` setting, the agent prepares a directory at its start.
        Ok(_) if config.store.is_none() && on != dir => {
            Check::ok(NAME, format!("the agent creates {} when it starts", dir.display()))
        }
        Ok(_) => fault(
            NAME,
            format!("{} is not on a tmpfs: lent pages must be in RAM", dir.display()),
            HELP,
        ),
    }
}

fn spill(dir: &Path) -> Check {
    const NAME: &str = "borrow.spill";
    match unwritable(dir) {
        Some(why) => fault(NAME, why, "set borrow.spill to a directory on a disk with room"),
        None if dir.exists() => Check::ok(NAME, format!("{} is writable", dir.display())),
        None => Check::warn(
            NAME,
            format!(
                "{} does not exist: the agent creates it when it starts, on the disk of {}",
                dir.display(),
                nearest(dir).display()
            ),
            "if that disk has no room for borrowed pages, mount another one there first",
        ),
    }
}

fn device(config: &Config) -> Check {
    const NAME: &str = "borrow.backend";
    match backend::choose(config.borrow.backend) {
        Ok(backend) => {
            Check::ok(NAME, format!("{} turns volumes into block devices", backend.kind()))
        }
        Err(error) => fault(NAME, error, "see 'aquifer doctor'"),
    }
}

/// Checks the peers' addresses; the configuration's parser has checked that the names are unique.
fn peers(config: &Config) -> Check {
    const NAME: &str = "peers";
    let mut seen = BTreeMap::from([(config.listen, &config.host)]);
    let mut faults = Vec::new();
    for peer in &config.peers {
        match peer.address.to_socket_addrs().map(|mut found| found.next()) {
            Ok(Some(at)) => {
                if let Some(other) = seen.insert(at, &peer.name) {
                    faults.push(format!("{} has the same address as {other}, {at}", peer.name));
                }
            }
            Ok(None) => {
                faults.push(format!("{}: '{}' resolves to no address", peer.name, peer.address))
            }
            Err(error) => {
                faults.push(format!("{}: cannot resolve '{}': {error}", peer.name, peer.address))
            }
        }
    }
    match (&*faults, config.peers.len()) {
        ([], 0) => Check::warn(
            NAME,
            "none: the agent cannot borrow or lend",
            "join a cluster with 'aquifer cluster join', or add a [[peer]] for each other host",
        ),
        ([], count) => Check::ok(NAME, format!("{count}, each with its own name and address")),
        (faults, _) => fault(NAME, faults.join("; "), "correct address in these [[peer]] sections"),
    }
}

fn qemu(program: &Path) -> Check {
    const NAME: &str = "vms.qemu";
    match find(program, &std::env::var_os("PATH").unwrap_or_default()) {
        Some(path) => Check::ok(NAME, format!("{} exists", path.display())),
        None => fault(
            NAME,
            format!("there is no program {}", program.display()),
            "install QEMU, or set vms.qemu to its path",
        ),
    }
}

fn groups(config: &Config) -> Check {
    const NAME: &str = "groups.agreements";
    let dir = &config.groups.agreements;
    match Agreements::of(dir).all() {
        Ok(all) => Check::ok(NAME, format!("{} in {}", all.len(), dir.display())),
        Err(error) if fs::metadata(dir).is_ok_and(|found| !found.is_dir()) => {
            fault(NAME, error, "set groups.agreements to a directory")
        }
        Err(error) => fault(NAME, error, "copy the group's file again from another of its hosts"),
    }
}
