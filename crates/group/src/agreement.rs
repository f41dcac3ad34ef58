//! The agreement of a group's members, and the file that holds it.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::{fmt, io};

use aquifer_control::group::agreements::{KeyId, TermsHash, is_listed, is_short};
use aquifer_control::group::{reprovision, scan_rate};
use aquifer_page::{Bytes, Group, HostName, RegionName, file};
use aquifer_region::RegionError;
use aquifer_volume::{Encryption, EncryptionKey, EncryptionMode};
use serde::{Deserialize, Serialize};

/// The most bytes of an agreement's file: a host that lies must not fill the disk of the others.
pub const LARGEST_AGREEMENT: usize = 16 << 10;

/// The terms on which the members of a group agree.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Agreement {
    /// Name of the group.
    pub name: Group,
    /// How the group's pages are encrypted when they leave a host.
    pub encryption: GroupEncryption,
    /// The key that the members share.
    pub key: EncryptionKey,
    /// Whether the group takes part in lending. Memory that its members save and do not need may
    /// then go to other groups of a host. The group may also borrow theirs, and then pays for their
    /// scanners.
    #[serde(default)]
    pub lends: bool,
    /// The cgroup of each host that the group's CPU time is charged to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<PathBuf>,
    /// Names of the regions and VMs that may join; a trailing `*` matches any text. If empty, all
    /// may.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<String>,
    /// Names of the hosts that may have this agreement; a trailing `*` matches any text. If empty,
    /// all of the cluster may.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    /// Limits of all members together on each host.
    #[serde(default)]
    pub limits: Limits,
    /// How fast the scanner of each host looks for equal pages.
    #[serde(default)]
    pub scan: scan_rate::Config,
    /// How the saved memory is handed out to the members.
    #[serde(default)]
    pub reprovision: reprovision::Config,
}

/// Limits of all members of a group together on each host. `None` sets no limit here; other limits
/// may apply.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Number of members.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub members: Option<usize>,
    /// Size of the members' memory, wherever it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Bytes>,
    /// RAM of the host for the members' caches. Within that limit, each cache gets as much as it
    /// needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<Bytes>,
}

/// How the pages of a group are encrypted when they leave a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupEncryption {
    /// With the group's key, so that equal pages have equal ciphertexts and a lender can share
    /// them.
    Deterministic,
    /// With a key for each lease, so that no two ciphertexts are equal. A lender learns nothing and
    /// can share nothing.
    Random,
    /// Not at all: a lender can read the pages.
    Off,
}

impl GroupEncryption {
    /// Returns whether it hides less than `other`. A host with the group's key can read what is
    /// `Deterministic`, and not what is `Random`.
    pub fn is_weaker_than(self, other: Self) -> bool {
        let strength = |encryption| match encryption {
            Self::Off => 0,
            Self::Deterministic => 1,
            Self::Random => 2,
        };
        strength(self) < strength(other)
    }
}

impl fmt::Display for GroupEncryption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Deterministic => "deterministic",
            Self::Random => "random",
            Self::Off => "off",
        })
    }
}

impl Agreement {
    /// Makes the agreement of a new group, with a random key.
    pub fn new(name: Group, encryption: GroupEncryption) -> Self {
        Self {
            name,
            encryption,
            key: EncryptionKey::random(),
            lends: false,
            cgroup: None,
            members: Vec::new(),
            hosts: Vec::new(),
            limits: Limits::default(),
            scan: scan_rate::Config::default(),
            reprovision: reprovision::Config::default(),
        }
    }

    /// Checks whether a region or VM of this name and size may join. `there` holds the other
    /// members on this host and their sizes.
    ///
    /// # Errors
    /// [`GroupError::NotMember`] if the name may not join; [`GroupError::Full`] if a limit would be
    /// exceeded.
    pub(crate) fn admit(
        &self,
        name: &RegionName,
        size: Bytes,
        there: &[(RegionName, Bytes)],
    ) -> Result<(), GroupError> {
        if !is_listed(&self.members, name.as_str()) {
            let (group, members) = (self.name.clone(), self.members.join(", "));
            return Err(GroupError::NotMember { group, name: name.clone(), members });
        }
        let full = |why: String| GroupError::Full { group: self.name.clone(), why };
        if let Some(most) = self.limits.members
            && there.len() >= most
        {
            let has = there.len();
            return Err(full(format!("it may have {most} members here, and has {has}")));
        }
        let has = there.iter().fold(Bytes::ZERO, |sum, (_, size)| sum.saturating_add(*size));
        if let Some(most) = self.limits.memory
            && has.saturating_add(size) > most
        {
            return Err(full(format!(
                "its members may have {most} here, and have {has}; '{name}' needs {size} more"
            )));
        }
        Ok(())
    }

    /// Returns the agreement without its key: with the key, all of the group's pages at lenders can
    /// be read.
    ///
    /// # Errors
    /// If the agreement cannot be represented as JSON, which is not known to happen.
    pub fn public(&self) -> serde_json::Result<serde_json::Value> {
        let mut public = serde_json::to_value(self)?;
        public.as_object_mut().map(|terms| terms.remove("key"));
        Ok(public)
    }

    /// Returns the text of the agreement's file.
    ///
    /// # Errors
    /// If the agreement cannot be represented as TOML, which is not known to happen.
    pub fn to_text(&self) -> Result<String, GroupError> {
        toml::to_string(self).map_err(|error| self.strange(error))
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// Says what is wrong, without the line concerned, which may hold the key.
    pub fn from_text(text: &str) -> Result<Self, String> {
        if text.len() > LARGEST_AGREEMENT {
            return Err("it has more than 16 KiB".to_owned());
        }
        toml::from_str(text).map_err(|error: toml::de::Error| error.message().to_owned())
    }

    /// Returns the id of the key.
    ///
    /// # Errors
    /// If the key's id is malformed, which is not known to happen.
    pub fn key_id(&self) -> Result<KeyId, GroupError> {
        self.key.id().parse().map_err(|error| self.strange(error))
    }

    /// Returns a hash of all terms and the key. A term that is added later must not be written
    /// while it has its default: two versions of this program would have different hashes.
    ///
    /// # Errors
    /// If the agreement cannot be represented as JSON, which is not known to happen.
    pub fn hash(&self) -> Result<TermsHash, GroupError> {
        let text = serde_json::to_vec(self).map_err(|error| self.strange(error))?;
        Ok(TermsHash(digest(&text)))
    }

    fn strange(&self, error: impl fmt::Display) -> GroupError {
        GroupError::Strange { name: self.name.clone(), why: error.to_string() }
    }

    /// Returns the encryption of a new lease of the group; `None` if its pages are not encrypted.
    pub fn lease_encryption(&self) -> Option<Encryption> {
        match self.encryption {
            GroupEncryption::Deterministic => {
                Some(Encryption { key: self.key.clone(), mode: EncryptionMode::Deterministic })
            }
            GroupEncryption::Random => Some(Encryption::random()),
            GroupEncryption::Off => None,
        }
    }
}

/// Returns the first 64 bits of the SHA-256 of `data`.
pub fn digest(data: &[u8]) -> u64 {
    let all = ring::digest::digest(&ring::digest::SHA256, data);
    all.as_ref().iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// An error in finding, making or changing an agreement.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// An operation on a file failed.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// The operation.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file does not hold an agreement of the group.
    #[error("{} is not an agreement of group '{name}': {why}", path.display())]
    Malformed {
        /// The group.
        name: Group,
        /// The file.
        path: PathBuf,
        /// The problem.
        why: String,
    },
    /// A group of that name exists.
    #[error(
        "a group '{0}' exists already: change it with 'aquifer group set {0}', or remove it with \
         'aquifer group rm {0}'"
    )]
    Exists(Group),
    /// The name is not among the group's members.
    #[error(
        "'{name}' is not a member of group '{group}'. Its members are: {members}. \
         Change them with 'aquifer group set {group} --member'"
    )]
    NotMember {
        /// The group.
        group: Group,
        /// The name that wants to join.
        name: RegionName,
        /// The names that may join.
        members: String,
    },
    /// A limit of the group would be exceeded.
    #[error(
        "group '{group}' is full: {why}. Raise --max-members or --max-memory with \
         'aquifer group set {group}'"
    )]
    Full {
        /// The group.
        group: Group,
        /// The limit, and the current value.
        why: String,
    },
    /// No group of that name exists on this host.
    #[error(
        "this host has no group '{0}': create it with 'aquifer group create {0}' on one host of \
         the cluster"
    )]
    Unknown(Group),
    /// An operator removed the group. Its file may stay for the regions that are in it.
    #[error(
        "group '{0}' was removed: when its regions here are gone, create another with 'aquifer \
         group create {0}'"
    )]
    Removed(Group),
    /// A version of another host weakens the encryption.
    #[error(
        "host {from} sent a version of group '{name}' that weakens --encryption from {was} to \
         {is}, and this host keeps its own: for weaker encryption, create another group"
    )]
    Weaker {
        /// The group.
        name: Group,
        /// The host.
        from: HostName,
        /// The encryption here.
        was: GroupEncryption,
        /// The encryption of that version.
        is: GroupEncryption,
    },
    /// The agreement is not the one that another host announced.
    #[error("host {from} sent an agreement of group '{name}' that it did not announce: {why}")]
    Tampered {
        /// The group.
        name: Group,
        /// The host.
        from: HostName,
        /// The difference.
        why: &'static str,
    },
    /// The list of hosts is too long to be told to all.
    #[error(
        "the names of group '{0}''s hosts exceed 1,000 bytes together: name fewer with --host, or \
         end a name with '*'"
    )]
    Hosts(Group),
    /// The agreement is too long to be sent to all.
    #[error(
        "the agreement of group '{0}' exceeds 16 KiB: name fewer with --member, or end a name with \
         '*'"
    )]
    Long(Group),
    /// The agreement cannot be represented.
    #[error("the agreement of group '{name}' cannot be represented: {why}")]
    Strange {
        /// The group.
        name: Group,
        /// The problem.
        why: String,
    },
    /// An operation on the group's regions failed.
    #[error(transparent)]
    Regions(#[from] RegionError),
}

/// The agreements of a host: a directory with a file `GROUP.toml` for each.
#[derive(Clone, Debug)]
pub struct Agreements {
    dir: PathBuf,
}

/// A group's name, and its agreement or the error in reading it.
pub type NamedAgreement = (Group, Result<Agreement, GroupError>);

impl Agreements {
    /// Takes the agreements in this directory, which need not exist.
    pub fn of(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    /// Returns the directory.
    pub fn directory(&self) -> &Path {
        &self.dir
    }

    /// Returns the path of a group's agreement.
    pub fn file(&self, name: &Group) -> PathBuf {
        self.dir.join(format!("{name}.toml"))
    }

    /// Reads the agreement of a group; returns `None` if this host has none.
    ///
    /// # Errors
    /// [`GroupError::Io`] if the file cannot be read; [`GroupError::Malformed`] if it holds no
    /// agreement of this group.
    pub fn find(&self, name: &Group) -> Result<Option<Agreement>, GroupError> {
        let path = self.file(name);
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(GroupError::Io { what: "reading", path, source }),
            Ok(text) => text,
        };
        let malformed =
            |why: String| GroupError::Malformed { name: name.clone(), path: path.clone(), why };
        let agreement = Agreement::from_text(&text).map_err(malformed)?;
        if agreement.name != *name {
            return Err(malformed(format!("it is the agreement of '{}'", agreement.name)));
        }
        Ok(Some(agreement))
    }

    /// Reads the agreement of a group that must exist.
    ///
    /// # Errors
    /// Those of [`Self::find`], and [`GroupError::Unknown`] if this host has none.
    pub fn get(&self, name: &Group) -> Result<Agreement, GroupError> {
        self.find(name)?.ok_or_else(|| GroupError::Unknown(name.clone()))
    }

    /// Reads all agreements, sorted by name.
    ///
    /// # Errors
    /// Those of [`Self::find`], for the first agreement that cannot be read.
    pub fn all(&self) -> Result<Vec<Agreement>, GroupError> {
        self.each()?.into_iter().map(|(_, agreement)| agreement).collect()
    }

    /// Reads each agreement, sorted by name, or returns its error.
    ///
    /// # Errors
    /// [`GroupError::Io`] if the directory cannot be listed.
    pub fn each(&self) -> Result<Vec<NamedAgreement>, GroupError> {
        let fail = |source| GroupError::Io { what: "listing", path: self.dir.clone(), source };
        let entries = match fs::read_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(fail)?,
        };
        let mut each = Vec::new();
        for entry in entries {
            let file = entry.map_err(fail)?.file_name();
            let name: Option<Group> =
                file.to_str().and_then(|file| file.strip_suffix(".toml")?.parse().ok());
            let Some(name) = name else { continue };
            let found = self.find(&name).transpose();
            each.extend(found.map(|found| (name, found)));
        }
        each.sort_by(|(one, _), (two, _)| one.cmp(two));
        Ok(each)
    }

    /// Replaces an agreement. The caller holds the lock of [`Agreements::lock`].
    ///
    /// # Errors
    /// [`GroupError::Unknown`] if the group does not exist; those of [`Self::find`] if its file
    /// cannot be read; [`GroupError::Io`] if the file cannot be written.
    pub fn change(&self, agreement: &Agreement) -> Result<(), GroupError> {
        self.get(&agreement.name)?;
        self.write(agreement)
    }

    /// Writes the file durably and atomically, readable by root only.
    pub(crate) fn write(&self, agreement: &Agreement) -> Result<(), GroupError> {
        if !is_short(&agreement.hosts) {
            return Err(GroupError::Hosts(agreement.name.clone()));
        }
        let path = self.file(&agreement.name);
        let text = agreement.to_text()?;
        if text.len() > LARGEST_AGREEMENT {
            return Err(GroupError::Long(agreement.name.clone()));
        }
        let write = || {
            DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
            file::replace_durably(&path, text.as_bytes())
        };
        write().map_err(|source| GroupError::Io { what: "writing", path: path.clone(), source })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn an_agreement_is_written_changed_copied_and_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let [here, there] = ["here", "there"].map(|host| Agreements::of(&dir.path().join(host)));
        let blue: Group = "blue".parse().unwrap();
        assert!(here.all().unwrap().is_empty() && here.find(&blue).unwrap().is_none());
        assert!(matches!(here.get(&blue), Err(GroupError::Unknown(_))));
        let made = Agreement::new(blue.clone(), GroupEncryption::Deterministic);
        assert!(matches!(here.change(&made), Err(GroupError::Unknown(_))));
        here.create(&made).unwrap();
        assert!(matches!(here.create(&made), Err(GroupError::Exists(_))));
        assert_eq!(fs::metadata(here.file(&blue)).unwrap().permissions().mode() & 0o777, 0o600);

        fs::create_dir(dir.path().join("there")).unwrap();
        fs::copy(here.file(&blue), there.file(&blue)).unwrap();
        assert_eq!(there.get(&blue).unwrap().lease_encryption(), made.lease_encryption());
        let changed = Agreement { encryption: GroupEncryption::Random, ..made.clone() };
        here.change(&changed).unwrap();
        assert_eq!(here.all().unwrap(), std::slice::from_ref(&changed));
        assert_ne!(
            changed.lease_encryption(),
            changed.lease_encryption(),
            "each lease has a key of its own"
        );
        assert_eq!(Agreement { encryption: GroupEncryption::Off, ..made }.lease_encryption(), None);

        here.remove(&blue).unwrap();
        assert!(matches!(here.remove(&blue), Err(GroupError::Unknown(_))));
    }

    #[test]
    fn a_listed_member_joins_while_there_is_room() {
        let name = |name: &str| -> RegionName { name.parse().unwrap() };
        let mut blue = Agreement::new("blue".parse().unwrap(), GroupEncryption::Deterministic);
        let there = [(name("db"), Bytes::mib(600))];
        let says = |blue: &Agreement, name: RegionName, mib| {
            blue.admit(&name, Bytes::mib(mib), &there).map_err(|error| error.to_string())
        };
        assert_eq!(says(&blue, name("anybody"), 1 << 20), Ok(()));
        blue.members = ["db", "web-*"].map(str::to_owned).to_vec();
        blue.limits.memory = Some(Bytes::mib(1024));
        for (member, mib) in [("db", 424), ("web-1", 424), ("web-", 1)] {
            assert_eq!(says(&blue, name(member), mib), Ok(()));
        }
        assert!(says(&blue, name("db2"), 1).unwrap_err().contains("members are: db, web-*"));
        assert!(
            says(&blue, name("web-1"), 425)
                .unwrap_err()
                .contains("may have 1GiB here, and have 600MiB")
        );
        blue.limits.members = Some(1);
        assert!(says(&blue, name("web-1"), 1).unwrap_err().contains("may have 1 members here"));
    }

    #[test]
    fn an_agreement_without_later_keys_has_their_defaults() {
        let dir = tempfile::tempdir().unwrap();
        let all = Agreements::of(dir.path());
        let made = Agreement::new("blue".parse().unwrap(), GroupEncryption::Deterministic);
        let text = toml::to_string(&made).unwrap();
        let old: Vec<_> = text
            .lines()
            .filter(|line| ["name", "encryption", "key"].iter().any(|key| line.starts_with(key)))
            .collect();
        let old = old.join("\n");
        fs::write(all.file(&made.name), old).unwrap();
        assert_eq!(all.get(&made.name).unwrap(), made);
        let full = Agreement {
            lends: true,
            cgroup: Some("/sys/fs/cgroup/cpu/blue".into()),
            members: vec!["web-*".to_owned()],
            limits: Limits {
                members: Some(4),
                memory: Some(Bytes::gib(4)),
                cache: Some(Bytes::gib(1)),
            },
            ..made
        };
        all.change(&full).unwrap();
        assert_eq!(all.get(&full.name).unwrap(), full);
    }

    #[test]
    fn a_files_error_is_named_without_showing_the_key() {
        let dir = tempfile::tempdir().unwrap();
        let all = Agreements::of(dir.path());
        let blue: Group = "blue".parse().unwrap();
        let good = toml::to_string(&Agreement::new(blue.clone(), GroupEncryption::Random)).unwrap();
        let key =
            good.lines().find_map(|line| line.strip_prefix("key = ")).unwrap().trim_matches('"');
        let cases = [
            (good.replace(key, &key[..40]), "64 hexadecimal digits"),
            (good.replace("random", "maybe"), "unknown variant `maybe`"),
            (good.replace("blue", "red"), "it is the agreement of 'red'"),
            (format!("more = 1\n{good}"), "unknown field `more`"),
        ];
        for (text, why) in cases {
            fs::write(all.file(&blue), text).unwrap();
            let error = all.get(&blue).unwrap_err().to_string();
            assert!(error.contains(why) && !error.contains(&key[..20]), "{error}");
            assert!(all.all().is_err());
        }
    }
}
