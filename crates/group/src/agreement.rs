//! What the members of a group agree on, and where that is written down.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use aquifer_control::group::{reprovision, scan_rate};
use aquifer_page::{Bytes, Group, RegionName, file};
use aquifer_pool::{Seal, SealKey, Sealing};
use aquifer_region::RegionError;
use serde::{Deserialize, Serialize};

/// What the members of a group agree on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Agreement {
    /// The group.
    pub name: Group,
    /// How its pages leave a host.
    pub sealed: Sealed,
    /// The key that they have in common.
    pub key: SealKey,
    /// What its members save and do not need may be lent to other groups of a host; and it may borrow what those do not need, and pays for their
    /// scanners then.
    #[serde(default)]
    pub lends: bool,
    /// The cgroup of each host in which it pays for CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<PathBuf>,
    /// The regions and VMs that may join: names, of which `*` at the end stands for any text. All may where none is named.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<String>,
    /// What its members may have together on each host.
    #[serde(default)]
    pub limits: Limits,
    /// How fast equal pages are looked for on each host.
    #[serde(default)]
    pub scan: scan_rate::Config,
    /// Who of its members gets what that saves.
    #[serde(default)]
    pub reprovision: reprovision::Config,
}

/// What the members of a group may have together on each host. What is not limited here others may limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// How many there may be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub members: Option<usize>,
    /// Memory, wherever it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Bytes>,
    /// RAM of the host that their caches may take. Of that, each gets what it needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<Bytes>,
}

/// How the pages of a group leave a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sealed {
    /// Under the group's key, so that equal pages are alike and a lender can keep one of them.
    Deterministic,
    /// Each lease under a key of its own, so that no two pages are alike: a lender can tell nothing, and share nothing.
    Random,
    /// As they are: a lender can read them.
    Off,
}

impl Agreement {
    /// A new group, with a key that nobody else has.
    pub fn new(name: Group, sealed: Sealed) -> Self {
        Self {
            name,
            sealed,
            key: SealKey::random(),
            lends: false,
            cgroup: None,
            members: Vec::new(),
            limits: Limits::default(),
            scan: scan_rate::Config::default(),
            reprovision: reprovision::Config::default(),
        }
    }

    /// Whether a region or VM of this name and size may join, beside those that are there with their sizes.
    ///
    /// # Errors
    /// [`GroupError::NotMember`], [`GroupError::Full`].
    pub(crate) fn admit(
        &self,
        name: &RegionName,
        size: Bytes,
        there: &[(RegionName, Bytes)],
    ) -> Result<(), GroupError> {
        let is_named = |member: &String| match member.strip_suffix('*') {
            Some(beginning) => name.as_str().starts_with(beginning),
            None => name.as_str() == member,
        };
        if !self.members.is_empty() && !self.members.iter().any(is_named) {
            let (group, members) = (self.name.clone(), self.members.join(", "));
            return Err(GroupError::NotMember { group, name: name.clone(), members });
        }
        let full = |why: String| GroupError::Full { group: self.name.clone(), why };
        if let Some(most) = self.limits.members
            && there.len() >= most
        {
            return Err(full(format!("it may have {most} members here, and has {}", there.len())));
        }
        let has = there.iter().fold(Bytes::ZERO, |sum, (_, size)| sum.saturating_add(*size));
        if let Some(most) = self.limits.memory
            && has.saturating_add(size) > most
        {
            return Err(full(format!(
                "its members may have {most} here, and have {has} without '{name}', which wants {size}"
            )));
        }
        Ok(())
    }

    /// All of it but the key, with which whoever has it can read all that the group has with lenders.
    ///
    /// # Errors
    /// None that is known.
    pub fn public(&self) -> serde_json::Result<serde_json::Value> {
        let mut public = serde_json::to_value(self)?;
        public.as_object_mut().map(|terms| terms.remove("key"));
        Ok(public)
    }

    /// By what to seal the pages of a new lease of the group.
    pub fn seal(&self) -> Option<Seal> {
        match self.sealed {
            Sealed::Deterministic => {
                Some(Seal { key: self.key.clone(), sealing: Sealing::Deterministic })
            }
            Sealed::Random => Some(Seal::own()),
            Sealed::Off => None,
        }
    }
}

/// Why an agreement could not be found, made or changed.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// A file.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// With which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// What is in a file is no agreement.
    #[error("{} is no agreement of group '{name}': {why}", path.display())]
    Malformed {
        /// The group.
        name: Group,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// There is one of that name.
    #[error(
        "there is a group '{0}' already: 'aquifer group set {0}' changes it, 'aquifer group rm {0}' ends it"
    )]
    Exists(Group),
    /// Somebody who is not to.
    #[error(
        "'{name}' is no member of group '{group}', which are: {members}. 'aquifer group set {group} --member' names others"
    )]
    NotMember {
        /// The group.
        group: Group,
        /// Who wants to join.
        name: RegionName,
        /// Who may.
        members: String,
    },
    /// It has all that it may have.
    #[error(
        "group '{group}' is full: {why}. 'aquifer group set {group}' with --max-members or --max-memory changes that"
    )]
    Full {
        /// The group.
        group: Group,
        /// What it has, and may have.
        why: String,
    },
    /// There is none of that name.
    #[error(
        "there is no group '{0}' on this host: 'aquifer group create {0}' makes it, and a copy of its file brings it from another host"
    )]
    Unknown(Group),
    /// Its regions.
    #[error(transparent)]
    Regions(#[from] RegionError),
}

/// The agreements that a host has: `GROUP.toml` each, in a directory.
#[derive(Clone, Debug)]
pub struct Agreements {
    dir: PathBuf,
}

/// A group's name, and its agreement or why that cannot be read.
pub type NamedAgreement = (Group, Result<Agreement, GroupError>);

impl Agreements {
    /// Those in this directory, which need not be there.
    pub fn of(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    /// The file of a group.
    pub fn file(&self, name: &Group) -> PathBuf {
        self.dir.join(format!("{name}.toml"))
    }

    /// The agreement of a group, if this host has it.
    ///
    /// # Errors
    /// [`GroupError::Io`]; [`GroupError::Malformed`].
    pub fn find(&self, name: &Group) -> Result<Option<Agreement>, GroupError> {
        let path = self.file(name);
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(GroupError::Io { what: "reading", path, source }),
            Ok(text) => text,
        };
        let malformed =
            |why: String| GroupError::Malformed { name: name.clone(), path: path.clone(), why };
        // (An error of the parser would show the line that it is about, and the key may be in it.)
        let agreement: Agreement = toml::from_str(&text)
            .map_err(|error: toml::de::Error| malformed(error.message().to_owned()))?;
        if agreement.name != *name {
            return Err(malformed(format!("it is that of '{}'", agreement.name)));
        }
        Ok(Some(agreement))
    }

    /// The agreement of a group.
    ///
    /// # Errors
    /// As [`Self::find`]; [`GroupError::Unknown`].
    pub fn get(&self, name: &Group) -> Result<Agreement, GroupError> {
        self.find(name)?.ok_or_else(|| GroupError::Unknown(name.clone()))
    }

    /// All of them, by name.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub fn all(&self) -> Result<Vec<Agreement>, GroupError> {
        self.each()?.into_iter().map(|(_, agreement)| agreement).collect()
    }

    /// Each of them by the name of its file, or what is wrong with it.
    ///
    /// # Errors
    /// [`GroupError::Io`]: they cannot be listed.
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

    /// Writes down a new one.
    ///
    /// # Errors
    /// [`GroupError::Exists`], [`GroupError::Io`].
    pub fn create(&self, agreement: &Agreement) -> Result<(), GroupError> {
        if self.file(&agreement.name).exists() {
            return Err(GroupError::Exists(agreement.name.clone()));
        }
        self.write(agreement)
    }

    /// Writes down what has changed.
    ///
    /// # Errors
    /// [`GroupError::Unknown`], [`GroupError::Io`].
    pub fn change(&self, agreement: &Agreement) -> Result<(), GroupError> {
        self.get(&agreement.name)?;
        self.write(agreement)
    }

    /// Forgets one.
    ///
    /// # Errors
    /// [`GroupError::Unknown`], [`GroupError::Io`].
    pub fn remove(&self, name: &Group) -> Result<(), GroupError> {
        let path = self.file(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(GroupError::Unknown(name.clone()))
            }
            removed => removed.map_err(|source| GroupError::Io { what: "removing", path, source }),
        }
    }

    /// For root only, and either the old one or the new one.
    fn write(&self, agreement: &Agreement) -> Result<(), GroupError> {
        let path = self.file(&agreement.name);
        let write = || {
            DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
            let text = toml::to_string(agreement).map_err(io::Error::other)?;
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
        let made = Agreement::new(blue.clone(), Sealed::Deterministic);
        assert!(matches!(here.change(&made), Err(GroupError::Unknown(_))));
        here.create(&made).unwrap();
        assert!(matches!(here.create(&made), Err(GroupError::Exists(_))));
        assert_eq!(fs::metadata(here.file(&blue)).unwrap().permissions().mode() & 0o777, 0o600);

        fs::create_dir(dir.path().join("there")).unwrap();
        fs::copy(here.file(&blue), there.file(&blue)).unwrap();
        assert_eq!(there.get(&blue).unwrap().seal(), made.seal());
        let changed = Agreement { sealed: Sealed::Random, ..made.clone() };
        here.change(&changed).unwrap();
        assert_eq!(here.all().unwrap(), std::slice::from_ref(&changed));
        assert_ne!(changed.seal(), changed.seal(), "each lease has a key of its own");
        assert_eq!(Agreement { sealed: Sealed::Off, ..made }.seal(), None);

        here.remove(&blue).unwrap();
        assert!(matches!(here.remove(&blue), Err(GroupError::Unknown(_))));
    }

    #[test]
    fn who_is_named_joins_while_there_is_room() {
        let name = |name: &str| -> RegionName { name.parse().unwrap() };
        let mut blue = Agreement::new("blue".parse().unwrap(), Sealed::Deterministic);
        let there = [(name("db"), Bytes::mib(600))];
        let says = |blue: &Agreement, name: RegionName, mib| {
            blue.admit(&name, Bytes::mib(mib), &there).map_err(|error| error.to_string())
        };
        assert_eq!(says(&blue, name("anybody"), 1 << 20), Ok(()));
        blue.members = ["db", "web-*"].map(str::to_owned).to_vec();
        blue.limits.memory = Some(Bytes::mib(1024));
        for (who, mib) in [("db", 424), ("web-1", 424), ("web-", 1)] {
            assert_eq!(says(&blue, name(who), mib), Ok(()));
        }
        assert!(says(&blue, name("db2"), 1).unwrap_err().contains("which are: db, web-*"));
        assert!(
            says(&blue, name("web-1"), 425)
                .unwrap_err()
                .contains("may have 1GiB here, and have 600MiB")
        );
        blue.limits.members = Some(1);
        assert!(says(&blue, name("web-1"), 1).unwrap_err().contains("may have 1 members here"));
    }

    #[test]
    fn an_agreement_of_before_is_one_still() {
        let dir = tempfile::tempdir().unwrap();
        let all = Agreements::of(dir.path());
        let made = Agreement::new("blue".parse().unwrap(), Sealed::Deterministic);
        let text = toml::to_string(&made).unwrap();
        let old: Vec<_> = text
            .lines()
            .filter(|line| ["name", "sealed", "key"].iter().any(|key| line.starts_with(key)))
            .collect();
        fs::write(all.file(&made.name), old.join("\n")).unwrap();
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
    fn what_is_wrong_with_a_file_is_said_and_no_key_shown() {
        let dir = tempfile::tempdir().unwrap();
        let all = Agreements::of(dir.path());
        let blue: Group = "blue".parse().unwrap();
        let good = toml::to_string(&Agreement::new(blue.clone(), Sealed::Random)).unwrap();
        let key =
            good.lines().find_map(|line| line.strip_prefix("key = ")).unwrap().trim_matches('"');
        let cases = [
            (good.replace(key, &key[..40]), "64 hexadecimal digits"),
            (good.replace("random", "maybe"), "unknown variant `maybe`"),
            (good.replace("blue", "red"), "it is that of 'red'"),
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
