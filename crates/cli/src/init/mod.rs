//! A cluster's directory: the authority, and what each host gets of its own.

mod template;

use std::fs;
use std::io::Write as _;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use aquifer_fabric::tls::{Authority, TlsError};
use aquifer_page::HostName;
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, OrFail, Result};

/// The port of agents.
const AGENT_PORT: u16 = 7070;

/// The port on which agents serve pages.
const PAGES_PORT: u16 = 7071;

/// The directory in which a cluster is administered.
#[derive(Debug)]
pub struct Cluster {
    /// The directory.
    pub dir: PathBuf,
    /// The cluster's name, for the authority's certificate.
    pub name: String,
}

/// A host to admit, or one that was admitted before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    name: HostName,
    /// How it was given: an IP address or a DNS name. Peers call it by this.
    address: String,
    /// Where it listens.
    ip: IpAddr,
}

/// What [`Cluster::make`] made.
#[derive(Debug, Serialize)]
pub struct Made {
    /// The directory of the authority.
    pub authority: PathBuf,
    /// Whether the authority is new.
    pub authority_is_new: bool,
    /// The hosts that were admitted.
    pub hosts: Vec<MadeHost>,
    /// Hosts admitted earlier, whose configuration does not list the new ones.
    pub to_be_told: Vec<HostName>,
    /// What to add to the configuration of those.
    pub peers: String,
}

/// What a host got.
#[derive(Debug, Serialize)]
pub struct MadeHost {
    /// Its name.
    pub name: HostName,
    /// The directory with its certificate, key and configuration.
    pub dir: PathBuf,
}

impl Member {
    /// A host that the others reach at `address`.
    ///
    /// # Errors
    /// If the address is a name that cannot be resolved.
    pub fn new(name: &HostName, address: &str) -> Result<Self> {
        let resolve = || (address, AGENT_PORT).to_socket_addrs().ok()?.next().map(|found| found.ip());
        let ip = address.parse().ok().or_else(resolve).ok_or_else(|| {
            Failure::new(
                format!("admitting {name}"),
                format!("'{address}' is no IP address and cannot be resolved"),
            )
            .help("give the IP address by which the other hosts reach it")
        })?;
        Ok(Self { name: name.clone(), address: address.to_owned(), ip })
    }

    /// Where its agent is called.
    fn agent(&self) -> String {
        if self.address.contains(':') {
            format!("[{}]:{AGENT_PORT}", self.address)
        } else {
            format!("{}:{AGENT_PORT}", self.address)
        }
    }
}

impl Cluster {
    /// Makes the authority if there is none, and for each member its certificate, key and configuration.
    ///
    /// # Errors
    /// If something of a member exists already and `force` is not given; then nothing is made. If a file cannot be
    /// written.
    pub fn make(&self, members: &[Member], force: bool) -> Result<Made> {
        if !force {
            members.iter().try_for_each(|member| self.refuse_existing(member))?;
        }
        let known = self.known(members)?;
        let (authority, authority_is_new) = self.authority()?;
        let mut hosts = Vec::new();
        for member in members {
            let dir = self.dir.join(member.name.as_str());
            let what = || format!("admitting {}", member.name);
            authority
                .issue(&dir.join("tls"), &member.name, std::slice::from_ref(&member.address), force)
                .or_fail(what)?;
            let peers = members.iter().filter(|other| other.name != member.name).map(peer_of_member);
            let peers: Vec<_> = known.iter().map(peer_of_known).chain(peers).collect();
            write_config(&dir.join("agent.toml"), &template::config(member, &peers.concat()), force)
                .or_fail(what)?;
            hosts.push(MadeHost { name: member.name.clone(), dir });
        }
        let to_be_told =
            if members.is_empty() { Vec::new() } else { known.into_iter().map(|host| host.host).collect() };
        let peers = members.iter().map(peer_of_member).collect();
        Ok(Made { authority: self.dir.clone(), authority_is_new, hosts, to_be_told, peers })
    }

    /// The authority, and whether it is new.
    fn authority(&self) -> Result<(Authority, bool)> {
        match Authority::create(&self.dir, &self.name) {
            Ok(authority) => Ok((authority, true)),
            Err(TlsError::Exists(_)) => {
                let loaded = Authority::load(&self.dir)
                    .or_fail(|| format!("using the authority in {}", self.dir.display()));
                loaded.map(|authority| (authority, false))
            }
            Err(error) => Err(error).or_fail(|| format!("making the authority in {}", self.dir.display())),
        }
    }

    fn refuse_existing(&self, member: &Member) -> Result<()> {
        let dir = self.dir.join(member.name.as_str());
        match ["agent.toml", "tls"].map(|file| dir.join(file)).into_iter().find(|path| path.exists()) {
            None => Ok(()),
            Some(path) => Err(Failure::new(
                format!("admitting {}", member.name),
                format!("{} exists", path.display()),
            )
            .help(
                "give --force to replace it: the host must then get the new certificate, the old key is gone",
            )),
        }
    }

    /// Hosts that were admitted earlier, as far as their configuration is still here and tells.
    fn known(&self, members: &[Member]) -> Result<Vec<Known>> {
        let entries = match fs::read_dir(&self.dir) {
            Ok(entries) => entries,
            Err(_) => return Ok(Vec::new()),
        };
        let mut known = Vec::new();
        for entry in entries {
            let entry = entry.or_fail(|| format!("reading {}", self.dir.display()))?;
            let text = fs::read_to_string(entry.path().join("agent.toml")).ok();
            let host = text.and_then(|text| toml::from_str::<Known>(&text).ok());
            known.extend(host.filter(|host| members.iter().all(|member| member.name != host.host)));
        }
        known.sort_by(|a, b| a.host.cmp(&b.host));
        Ok(known)
    }
}

/// What the configuration of a host admitted earlier tells of it.
#[derive(Debug, Deserialize)]
struct Known {
    host: HostName,
    listen: SocketAddr,
}

fn peer_of_member(member: &Member) -> String {
    template::peer(&member.name, &member.agent())
}

fn peer_of_known(known: &Known) -> String {
    template::peer(&known.host, &known.listen.to_string())
}

/// Writes a configuration; without `force` never over another.
fn write_config(path: &Path, text: &str, force: bool) -> std::io::Result<()> {
    let mut options = fs::OpenOptions::new();
    options.write(true).mode(0o644);
    if force {
        options.create(true).truncate(true)
    } else {
        options.create_new(true)
    };
    options.open(path)?.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str, address: &str) -> Member {
        Member::new(&name.parse().unwrap(), address).unwrap()
    }

    fn cluster() -> (tempfile::TempDir, Cluster) {
        let dir = tempfile::tempdir().unwrap();
        let cluster = Cluster { dir: dir.path().join("cluster"), name: "test".to_owned() };
        (dir, cluster)
    }

    fn config(cluster: &Cluster, host: &str) -> String {
        fs::read_to_string(cluster.dir.join(host).join("agent.toml")).unwrap()
    }

    #[test]
    fn every_host_gets_its_own_and_knows_the_others() {
        let (_dir, cluster) = cluster();
        let made = cluster.make(&[member("a", "192.0.2.1"), member("b", "2001:db8::2")], false).unwrap();
        assert!(made.authority_is_new && made.to_be_told.is_empty());
        for (host, other) in [("a", "[2001:db8::2]:7070"), ("b", "192.0.2.1:7070")] {
            let parsed: toml::Table = config(&cluster, host).parse().unwrap();
            assert_eq!(parsed["host"].as_str(), Some(host));
            let peers = parsed["peer"].as_array().unwrap();
            assert_eq!(peers.len(), 1);
            assert_eq!(peers[0]["address"].as_str(), Some(other));
            assert!(cluster.dir.join(host).join("tls/host.key").exists());
        }
    }

    #[test]
    fn a_host_admitted_later_knows_the_earlier_ones_and_says_who_must_learn_of_it() {
        let (_dir, cluster) = cluster();
        cluster.make(&[member("a", "192.0.2.1")], false).unwrap();
        let made = cluster.make(&[member("b", "192.0.2.2")], false).unwrap();
        assert!(!made.authority_is_new);
        assert_eq!(made.to_be_told, ["a".parse().unwrap()]);
        assert!(made.peers.contains("192.0.2.2:7070"), "{}", made.peers);
        assert!(config(&cluster, "b").contains("192.0.2.1:7070"));
    }

    #[test]
    fn nothing_is_overwritten_unless_asked_and_then_nothing_is_half_made() {
        let (_dir, cluster) = cluster();
        cluster.make(&[member("a", "192.0.2.1")], false).unwrap();
        let before = config(&cluster, "a");
        let error = cluster.make(&[member("b", "192.0.2.2"), member("a", "192.0.2.9")], false).unwrap_err();
        assert!(error.to_string().contains("exists") && error.help.is_some(), "{error}");
        assert_eq!(config(&cluster, "a"), before);
        assert!(!cluster.dir.join("b").exists());
        cluster.make(&[member("a", "192.0.2.9")], true).unwrap();
        assert!(config(&cluster, "a").contains("192.0.2.9"));
    }

    #[test]
    fn a_name_that_leads_nowhere_is_refused_with_the_way_out() {
        let error = Member::new(&"a".parse().unwrap(), "not an address").unwrap_err();
        assert!(error.help.unwrap().contains("IP address"));
    }
}
