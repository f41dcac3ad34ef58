//! A cluster's directory: the authority, and the files of each host.

mod draft;
pub(crate) mod template;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};

use aquifer_page::HostName;
use aquifer_transport::tls::{Authority, CA_CERTIFICATE, CA_KEY, TEN_YEARS};
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, OrFail, Result};
use draft::Draft;

/// A host's configuration, in its directory.
const CONFIG: &str = "agent.toml";

/// The directory of a host's certificate, in its directory.
const TLS: &str = "tls";

/// The port of agents.
pub(crate) const AGENT_PORT: u16 = 7070;

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
    /// An IP address or a DNS name, as the operator gave it; peers use it.
    address: String,
    /// The address on which the host listens.
    ip: IpAddr,
}

/// The result of [`Cluster::make`].
#[derive(Debug, Serialize)]
pub struct Made {
    /// The directory of the authority.
    pub authority: PathBuf,
    /// Whether the authority is new.
    pub authority_is_new: bool,
    /// The admitted hosts.
    pub hosts: Vec<MadeHost>,
    /// Hosts admitted earlier; their configurations do not list the new ones.
    pub to_be_told: Vec<HostName>,
    /// The sections to add to those configurations.
    pub peers: String,
}

/// The files made for a host.
#[derive(Debug, Serialize)]
pub struct MadeHost {
    /// Its name.
    pub name: HostName,
    /// The directory with its certificate, key and configuration.
    pub dir: PathBuf,
}

impl Member {
    /// Returns a host that the others reach at `address`.
    ///
    /// # Errors
    /// If the address is a name that cannot be resolved.
    pub fn new(name: &HostName, address: &str) -> Result<Self> {
        let resolve =
            || (address, AGENT_PORT).to_socket_addrs().ok()?.next().map(|found| found.ip());
        let ip = address.parse().ok().or_else(resolve).ok_or_else(|| {
            Failure::new(
                format!("admitting {name}"),
                format!("'{address}' is not an IP address and cannot be resolved"),
            )
            .help("give the IP address at which the other hosts reach it")
        })?;
        Ok(Self { name: name.clone(), address: address.to_owned(), ip })
    }

    /// Returns the address of its agent.
    fn agent(&self) -> String {
        if self.address.contains(':') {
            format!("[{}]:{AGENT_PORT}", self.address)
        } else {
            format!("{}:{AGENT_PORT}", self.address)
        }
    }
}

impl Cluster {
    /// Makes the authority if there is none, and each member's certificate, key and configuration.
    ///
    /// All files are made in a draft, and move to their places when they are complete.
    ///
    /// # Errors
    /// If names or addresses are not unique, if a member's files exist and `force` is false, or if
    /// a file cannot be written. Nothing is made then, unless the last moves fail half-way.
    pub fn make(&self, members: &[Member], force: bool) -> Result<Made> {
        let known = self.known(members)?;
        refuse_duplicates(members, &known)?;
        if !force {
            members.iter().try_for_each(|member| self.refuse_existing(member))?;
        }
        let draft =
            Draft::begin(&self.dir).or_fail(|| format!("creating {}", self.dir.display()))?;
        let (authority, authority_is_new) = self.authority(draft.path())?;
        for member in members {
            let dir = draft.path().join(member.name.as_str());
            let what = || format!("admitting {}", member.name);
            authority
                .issue(&dir.join(TLS), &member.name, std::slice::from_ref(&member.address), false)
                .or_fail(what)?;
            let peers =
                members.iter().filter(|other| other.name != member.name).map(peer_of_member);
            let peers: Vec<_> = known.iter().map(peer_of_known).chain(peers).collect();
            fs::write(dir.join(CONFIG), template::config(member, &peers.concat())).or_fail(what)?;
        }
        draft.keep().or_fail(|| format!("writing to {}", self.dir.display()))?;
        let made = |member: &Member| MadeHost {
            name: member.name.clone(),
            dir: self.dir.join(member.name.as_str()),
        };
        let to_be_told = if members.is_empty() {
            Vec::new()
        } else {
            known.into_iter().map(|host| host.host).collect()
        };
        Ok(Made {
            authority: self.dir.clone(),
            authority_is_new,
            hosts: members.iter().map(made).collect(),
            to_be_told,
            peers: members.iter().map(peer_of_member).collect(),
        })
    }

    /// Returns the authority, and whether it is new; a new one is in `draft`.
    fn authority(&self, draft: &Path) -> Result<(Authority, bool)> {
        let is_new = [CA_CERTIFICATE, CA_KEY].iter().all(|file| !self.dir.join(file).exists());
        let authority =
            if is_new { Authority::create(draft, &self.name) } else { Authority::load(&self.dir) };
        let verb = if is_new { "creating" } else { "using" };
        authority
            .or_fail(|| format!("{verb} the authority in {}", self.dir.display()))
            // No signer runs that could renew them.
            .map(|authority| (authority.with_lifetime(TEN_YEARS), is_new))
    }

    fn refuse_existing(&self, member: &Member) -> Result<()> {
        let dir = self.dir.join(member.name.as_str());
        match [CONFIG, TLS].map(|file| dir.join(file)).into_iter().find(|path| path.exists()) {
            None => Ok(()),
            Some(path) => Err(Failure::new(
                format!("admitting {}", member.name),
                format!("{} exists already", path.display()),
            )
            .help(
                "use --force to replace it, and copy the new certificate to the host: \
                 the old key is lost",
            )),
        }
    }

    /// Returns the hosts admitted earlier, if their configurations are here and can be parsed.
    fn known(&self, members: &[Member]) -> Result<Vec<Known>> {
        let entries = match fs::read_dir(&self.dir) {
            Ok(entries) => entries,
            Err(_) => return Ok(Vec::new()),
        };
        let mut known = Vec::new();
        for entry in entries {
            let entry = entry.or_fail(|| format!("reading {}", self.dir.display()))?;
            let text = fs::read_to_string(entry.path().join(CONFIG)).ok();
            let host = text.and_then(|text| toml::from_str::<Known>(&text).ok());
            known.extend(host.filter(|host| members.iter().all(|member| member.name != host.host)));
        }
        known.sort_by(|a, b| a.host.cmp(&b.host));
        Ok(known)
    }
}

/// The part of an earlier host's configuration that is needed here.
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

/// Refuses two hosts with the same name or the same address.
fn refuse_duplicates(members: &[Member], known: &[Known]) -> Result<()> {
    let mut names = BTreeSet::new();
    let mut addresses: BTreeMap<_, _> =
        known.iter().map(|host| (host.listen.ip(), &host.host)).collect();
    for member in members {
        let fail = |why: String, help: &str| {
            Err(Failure::new(format!("admitting {}", member.name), why).help(help))
        };
        if !names.insert(&member.name) {
            return fail(
                "it is named twice".to_owned(),
                "name each host once, with its own --address",
            );
        }
        if let Some(other) = addresses.insert(member.ip, &member.name) {
            let why = format!("its address {} is also that of host {other}", member.address);
            return fail(why, "give each host the address at which the others reach it");
        }
    }
    Ok(())
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
        let made =
            cluster.make(&[member("a", "192.0.2.1"), member("b", "2001:db8::2")], false).unwrap();
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
    fn a_host_admitted_later_knows_and_names_the_earlier_ones() {
        let (_dir, cluster) = cluster();
        cluster.make(&[member("a", "192.0.2.1")], false).unwrap();
        let made = cluster.make(&[member("b", "192.0.2.2")], false).unwrap();
        assert!(!made.authority_is_new);
        assert_eq!(made.to_be_told, ["a".parse().unwrap()]);
        assert!(made.peers.contains("192.0.2.2:7070"), "{}", made.peers);
        assert!(config(&cluster, "b").contains("192.0.2.1:7070"));
    }

    #[test]
    fn nothing_is_overwritten_without_force_or_half_made() {
        let (_dir, cluster) = cluster();
        cluster.make(&[member("a", "192.0.2.1")], false).unwrap();
        let before = config(&cluster, "a");
        let error =
            cluster.make(&[member("b", "192.0.2.2"), member("a", "192.0.2.9")], false).unwrap_err();
        assert!(error.to_string().contains("exists") && error.help.is_some(), "{error}");
        assert_eq!(config(&cluster, "a"), before);
        assert!(!cluster.dir.join("b").exists());
        cluster.make(&[member("a", "192.0.2.9")], true).unwrap();
        assert!(config(&cluster, "a").contains("192.0.2.9"));
    }

    #[test]
    fn a_name_or_an_address_twice_makes_nothing() {
        let (_dir, cluster) = cluster();
        for (members, why) in [
            ([member("a", "192.0.2.1"), member("a", "192.0.2.2")], "named twice"),
            ([member("a", "192.0.2.1"), member("b", "192.0.2.1")], "that of host a"),
        ] {
            let error = cluster.make(&members, true).unwrap_err();
            assert!(error.why.contains(why) && error.help.is_some(), "{error}");
            assert!(!cluster.dir.exists(), "nothing is left");
        }
        cluster.make(&[member("a", "192.0.2.1")], false).unwrap();
        let error = cluster.make(&[member("b", "192.0.2.1")], false).unwrap_err();
        assert!(
            error.why.contains("that of host a"),
            "an address of a host admitted before: {error}"
        );
        cluster.make(&[member("a", "192.0.2.1")], true).unwrap();
    }

    #[test]
    fn a_failure_half_way_leaves_nothing() {
        let (_dir, cluster) = cluster();
        // No certificate can carry the name `b-`.
        let members = [member("a", "192.0.2.1"), member("b-", "192.0.2.2")];
        cluster.make(&members, false).unwrap_err();
        assert!(!cluster.dir.exists());
        cluster.make(&members[..1], false).unwrap();
        let before = config(&cluster, "a");
        cluster.make(&members, true).unwrap_err();
        assert_eq!(config(&cluster, "a"), before);
        let mut left: Vec<_> =
            fs::read_dir(&cluster.dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["a", "ca.key", "ca.pem"]);
    }

    #[test]
    fn a_name_that_leads_nowhere_is_refused_with_the_way_out() {
        let error = Member::new(&"a".parse().unwrap(), "not an address").unwrap_err();
        assert!(error.help.unwrap().contains("IP address"));
    }
}
