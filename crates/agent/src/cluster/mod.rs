//! The cluster that this host belongs to: its key, its hosts, and on a signer how it admits more.
//!
//! A directory holds what must survive a reboot: `gossip.key`, `members.json` and `life`. On a
//! signer, a host that can admit others, it also has the authority (`ca.pem`, `ca.key`), its tokens
//! (`tokens.json`) and the certificates that it issued (`hosts/NAME.pem`).
//!
//! - [`Token`]: what a host needs to join. `admitting`: how a signer answers one that does.
//!   `leaving`: how a host leaves. `renewing`: how it keeps a valid certificate. `record`: what a
//!   signer knows of the certificates that it gave.
//!   `revoking`: how all hosts learn that one may not be in the cluster any more. `hearing`: how a
//!   signer that starts learns it before it signs.
//! - `gossip`: the task that passes datagrams between the network and [`aquifer_membership`].

mod admitting;
mod gossip;
mod hearing;
mod leaving;
mod record;
mod renewing;
mod revoking;
mod token;

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use aquifer_api::message::GossipKey;
pub use aquifer_membership::Key;
use aquifer_page::HostName;
use aquifer_page::file::replace_durably;
use aquifer_transport::tls::{
    Authority, CA_CERTIFICATE, CA_KEY, Fingerprint, TlsError, fingerprint,
};
use record::Record;
use rustix::fs::FlockOperation;

pub(crate) use admitting::{Admission, Certified};
pub(crate) use gossip::Gossip;
pub(crate) use hearing::Hearing;
pub(crate) use leaving::Leaving;
pub use renewing::describe;
pub(crate) use renewing::{Renewing, open as open_identity};
pub(crate) use revoking::Revoking;
pub use token::{Token, TokenError};

const KEY: &str = "gossip.key";
/// The present key with its number and signature, once a host was revoked.
const LATEST_KEY: &str = "gossip.latest.json";
const MEMBERS: &str = "members.json";
const LIFE: &str = "life";
const TOKENS: &str = "tokens.json";
const HOSTS: &str = "hosts";

/// A hundred years in ms.
const CENTURY: u64 = 100 * 365 * 24 * 3600 * 1000;

/// The directory of a cluster on this host.
#[derive(Clone, Debug)]
pub struct ClusterDir(PathBuf);

/// The reason why a file of the cluster cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// The operating system failed to read or write a file.
    #[error("cannot {0} {path}: {2}", path = .1.display())]
    File(&'static str, PathBuf, io::Error),
    /// A file has content that this program does not understand.
    #[error("{path} is damaged: {1}", path = .0.display())]
    Damaged(PathBuf, String),
    /// The authority cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The kernel gives no random bytes.
    #[error("the kernel gives no random bytes")]
    Random,
}

type Result<T> = std::result::Result<T, ClusterError>;

impl ClusterDir {
    /// Names the directory, which need not exist.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the cluster's key; `None` if this host belongs to no cluster of this kind.
    ///
    /// # Errors
    /// If the file cannot be read, or holds no key.
    pub fn key(&self) -> Result<Option<Key>> {
        let path = self.0.join(KEY);
        if path.exists()
            && let Some(latest) = self.latest_key()?
            && let Some(key) = Key::from_hex(&latest.key)
        {
            return Ok(Some(key));
        }
        match fs::read_to_string(&path) {
            Ok(text) => match Key::from_hex(&text) {
                Some(key) => Ok(Some(key)),
                None => Err(ClusterError::Damaged(path, "it holds no key".to_owned())),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(ClusterError::File("read", path, error)),
        }
    }

    /// Returns the cluster's key as its signer last changed it; `None` if it never did.
    pub(crate) fn latest_key(&self) -> Result<Option<GossipKey>> {
        self.read(LATEST_KEY)
    }

    /// Records the cluster's key as its signer changed it.
    pub(crate) fn keep_latest_key(&self, key: &GossipKey) -> Result<()> {
        self.write_json(LATEST_KEY, &Some(key))
    }

    /// Returns whether this host can admit others.
    pub fn admits(&self) -> bool {
        self.0.join(CA_KEY).exists()
    }

    /// Locks the directory, which is made if it is missing, against other commands. The lock ends
    /// with the file.
    ///
    /// # Errors
    /// If the directory cannot be made or opened.
    pub fn lock(&self) -> Result<File> {
        self.make()?;
        let locked = File::open(&self.0).and_then(|dir| {
            rustix::fs::flock(&dir, FlockOperation::LockExclusive)?;
            Ok(dir)
        });
        locked.map_err(|error| ClusterError::File("lock", self.0.clone(), error))
    }

    fn make(&self) -> Result<()> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.0);
        made.map_err(|error| ClusterError::File("create", self.0.clone(), error))
    }

    /// Begins a new cluster, whose first signer is this host, or goes on with one that a former
    /// call began. Returns the authority.
    ///
    /// # Errors
    /// If the directory cannot be read or written.
    pub fn create(&self, name: &str) -> Result<Authority> {
        let authority = if self.admits() {
            Authority::load(&self.0)?
        } else {
            // A certificate without a key is of a call that was interrupted.
            self.remove_file(&self.0.join(CA_CERTIFICATE))?;
            Authority::create(&self.0, name)?
        };
        if self.key()?.is_none() {
            self.join(
                &Key::random().map_err(|_| ClusterError::Random)?,
                &BTreeMap::new(),
                0,
                None,
            )?;
        }
        Ok(authority)
    }

    /// Writes what a host of the cluster needs: its key, the other hosts, and the number of the
    /// last life of a host with this name. `latest` is the key as a signer last changed it.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn join(
        &self,
        key: &Key,
        members: &BTreeMap<HostName, SocketAddr>,
        life: u64,
        latest: Option<&GossipKey>,
    ) -> Result<()> {
        self.make()?;
        self.keep_members(members)?;
        let last: Option<u64> = self.read(LIFE).unwrap_or_default();
        self.write_json(LIFE, &last.max(Some(life)))?;
        match latest {
            // With its number, no former key can replace it.
            Some(latest) => self.keep_latest_key(latest)?,
            None => self.remove_file(&self.0.join(LATEST_KEY)).map(drop)?,
        }
        // The key is last: with it, the host belongs to the cluster.
        self.write(KEY, format!("{}\n", key.to_hex()).as_bytes())
    }

    /// Removes all that [`ClusterDir::join`] and [`ClusterDir::create`] wrote, and the directory if
    /// nothing else is in it.
    ///
    /// # Errors
    /// If a file cannot be removed.
    pub fn remove(&self) -> Result<()> {
        for host in self.admitted()? {
            self.remove_file(&self.issued(&host))?;
        }
        // The key is first: without it, the host belongs to no cluster.
        for file in [KEY, LATEST_KEY, CA_KEY, CA_CERTIFICATE, TOKENS, MEMBERS, LIFE] {
            self.remove_file(&self.0.join(file))?;
        }
        // Whatever else is there is not ours.
        let _ = fs::remove_dir(self.0.join(HOSTS));
        let _ = fs::remove_dir(&self.0);
        Ok(())
    }

    /// Returns the names of the hosts that this signer admitted, except those that have left.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn admitted(&self) -> Result<Vec<HostName>> {
        let dir = self.0.join(HOSTS);
        let failed = |error| ClusterError::File("read", dir.clone(), error);
        let entries = match fs::read_dir(&dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed(error)),
        };
        let mut hosts = Vec::new();
        for entry in entries {
            let name = entry.map_err(failed)?.file_name();
            let name = name.to_str().and_then(|name| name.strip_suffix(".pem"));
            hosts.extend(name.and_then(|name| name.parse().ok()));
        }
        Ok(hosts)
    }

    fn remove_file(&self, path: &Path) -> Result<bool> {
        match fs::remove_file(path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(ClusterError::File("remove", path.to_owned(), error)),
        }
    }

    /// Returns whether there is a list of hosts: this host belongs to a cluster, or did.
    pub(crate) fn knows_hosts(&self) -> bool {
        self.0.join(MEMBERS).exists()
    }

    /// Returns the hosts of the cluster that this one last knew.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn members(&self) -> Result<BTreeMap<HostName, SocketAddr>> {
        self.read(MEMBERS)
    }

    pub(crate) fn keep_members(&self, members: &BTreeMap<HostName, SocketAddr>) -> Result<()> {
        self.write_json(MEMBERS, members)
    }

    /// Returns a number for a new life of this host: larger than all before, even if the clock was
    /// set back. `clock` has the milliseconds since 1970.
    pub(crate) fn next_life(&self, clock: u64) -> Result<u64> {
        let last: Option<u64> = self.read(LIFE)?;
        // A number far in the future comes from no clock.
        let last = last.filter(|last| *last < clock.saturating_add(CENTURY));
        let life = last.map_or(clock, |last| clock.max(last + 1));
        self.write_json(LIFE, &Some(life))?;
        Ok(life)
    }

    /// Returns the fingerprint of the authority, whose certificate is in the directory of a signer.
    ///
    /// # Errors
    /// If this host is no signer.
    pub fn fingerprint(&self) -> Result<Fingerprint> {
        Ok(fingerprint(&Authority::load(&self.0)?.certificate()?)?)
    }

    /// Frees the name of a host that this signer admitted, if all its certificates were issued
    /// until then.
    fn free(&self, host: &HostName, until: SystemTime) -> Result<()> {
        let is_newer = self.record(host)?.and_then(|record| record.issued());
        if is_newer.is_some_and(|issued| issued > until) {
            return Ok(());
        }
        self.remove_file(&self.issued(host)).map(drop)
    }

    /// Returns the file of a certificate that this signer issued.
    fn issued(&self, host: &HostName) -> PathBuf {
        self.0.join(HOSTS).join(format!("{host}.pem"))
    }

    /// Returns what this signer knows of the certificates that a host may use; nothing if the name
    /// is free.
    fn record(&self, host: &HostName) -> Result<Option<Record>> {
        let issued = self.issued(host);
        match fs::read_to_string(&issued) {
            Ok(pem) => Ok(Some(Record::of(&pem))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(ClusterError::File("read", issued, error)),
        }
    }

    /// Records the certificates that this signer issued to a host.
    fn keep_record(&self, host: &HostName, record: &Record) -> Result<()> {
        let issued = self.issued(host);
        let kept = fs::create_dir_all(issued.parent().unwrap_or(self.path()))
            .and_then(|()| replace_durably(&issued, record.to_pem().as_bytes()));
        kept.map_err(|error| ClusterError::File("write", issued, error))
    }

    /// Reads JSON; the default if there is no file.
    fn read<T: serde::de::DeserializeOwned + Default>(&self, file: &str) -> Result<T> {
        let path = self.0.join(file);
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text)
                .map_err(|error| ClusterError::Damaged(path, error.to_string())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(T::default()),
            Err(error) => Err(ClusterError::File("read", path, error)),
        }
    }

    fn write_json(&self, file: &str, content: &impl serde::Serialize) -> Result<()> {
        let text = serde_json::to_vec_pretty(content)
            .map_err(|error| ClusterError::Damaged(self.0.join(file), error.to_string()))?;
        self.write(file, &text)
    }

    fn write(&self, file: &str, content: &[u8]) -> Result<()> {
        let path = self.0.join(file);
        replace_durably(&path, content).map_err(|error| ClusterError::File("write", path, error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_life_is_always_larger_than_the_last() {
        let dir = tempfile::tempdir().unwrap();
        let cluster = ClusterDir::new(dir.path());
        assert_eq!(cluster.next_life(1000).unwrap(), 1000);
        assert_eq!(cluster.next_life(900).unwrap(), 1001, "the clock was set back");
        assert_eq!(cluster.next_life(5000).unwrap(), 5000);
        cluster.write_json(LIFE, &Some(u64::MAX)).unwrap();
        assert_eq!(cluster.next_life(6000).unwrap(), 6000, "the file was damaged");
        cluster.join(&Key::random().unwrap(), &BTreeMap::new(), 9000, None).unwrap();
        assert_eq!(cluster.next_life(7000).unwrap(), 9001, "a former host had this name");
    }

    #[test]
    fn a_cluster_is_created_once_and_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let cluster = ClusterDir::new(dir.path().join("cluster"));
        assert!(cluster.key().unwrap().is_none() && !cluster.admits());
        cluster.create("test").unwrap();
        let key = cluster.key().unwrap().unwrap().to_hex();
        assert!(cluster.admits() && cluster.members().unwrap().is_empty());
        cluster.create("test").unwrap();
        assert_eq!(cluster.key().unwrap().unwrap().to_hex(), key);
        fs::write(cluster.path().join(KEY), "half").unwrap();
        let error = cluster.key().unwrap_err().to_string();
        assert!(error.contains("gossip.key is damaged"), "{error}");
    }

    #[test]
    fn a_cluster_half_created_is_created_and_removed_alone() {
        let dir = tempfile::tempdir().unwrap();
        let cluster = ClusterDir::new(dir.path());
        cluster.create("test").unwrap();
        fs::remove_file(dir.path().join(CA_KEY)).unwrap();
        let authority = cluster.create("test").unwrap();
        assert_eq!(
            fingerprint(&authority.certificate().unwrap()).unwrap(),
            cluster.fingerprint().unwrap()
        );
        fs::create_dir(dir.path().join("other")).unwrap();
        cluster.remove().unwrap();
        let left: Vec<_> = fs::read_dir(dir.path()).unwrap().collect();
        assert_eq!(left.len(), 1, "{left:?}");
        fs::remove_dir(dir.path().join("other")).unwrap();
        cluster.remove().unwrap();
        assert!(!dir.path().exists());
    }
}
