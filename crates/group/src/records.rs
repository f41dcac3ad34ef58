//! What a host remembers of its agreements, in files beside them.
//!
//! - `GROUP.toml`: the agreement. An operator may edit it.
//! - `GROUP.edition`: the version of that content. If the content is another one, an operator has
//!   changed it, and it gets the next version.
//! - `GROUP.KEY.removed`: an operator removed the agreement with the key of this id, here or on
//!   another host. It stays for good, so that no host that was away brings the agreement back.
//!
//! Each writer holds a lock on the directory: the command line and the agent both write.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use aquifer_control::group::agreements::{Catalog, Edition, KeyId, State};
use aquifer_page::{Group, HostName, file};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::agreement::{Agreement, Agreements, GroupError};
use crate::join::has_regions;

/// The version of an agreement's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    key: KeyId,
    edition: Edition,
    by: HostName,
}

/// An agreement of this host.
#[derive(Clone, Debug, PartialEq)]
pub struct Held {
    /// The agreement.
    pub agreement: Agreement,
    /// The id of its key.
    pub key: KeyId,
    /// Its version.
    pub edition: Edition,
    /// The host where an operator made this version.
    pub by: HostName,
}

/// An agreement that another host gave.
#[derive(Clone, Debug)]
pub struct Offered {
    /// The agreement.
    pub agreement: Agreement,
    /// The id of the key and the version that the other host announced.
    pub announced: (KeyId, Edition),
    /// The host where an operator made it.
    pub by: HostName,
    /// The host that gave it.
    pub from: HostName,
}

/// All that the directory holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Survey {
    /// The agreements.
    pub held: BTreeMap<Group, Held>,
    /// Groups with a file that cannot be read.
    pub unreadable: BTreeSet<Group>,
    /// The agreements that an operator removed.
    pub removed: BTreeSet<(Group, KeyId)>,
}

impl Agreements {
    /// Keeps all other writers out until the caller drops the result. Makes the directory if it is
    /// missing.
    ///
    /// # Errors
    /// [`GroupError::Io`] if the directory cannot be made or locked.
    pub fn lock(&self) -> Result<File, GroupError> {
        let path = self.directory();
        let lock = || {
            DirBuilder::new().recursive(true).mode(0o700).create(path)?;
            let directory = File::open(path)?;
            flock(&directory, FlockOperation::LockExclusive)?;
            Ok(directory)
        };
        lock().map_err(|source| GroupError::Io { what: "locking", path: path.to_owned(), source })
    }

    /// Writes a new agreement.
    ///
    /// # Errors
    /// [`GroupError::Exists`] if the group exists; [`GroupError::Io`] if the file cannot be
    /// written.
    pub fn create(&self, agreement: &Agreement) -> Result<(), GroupError> {
        let _lock = self.lock()?;
        if self.file(&agreement.name).exists() {
            return Err(GroupError::Exists(agreement.name.clone()));
        }
        self.write(agreement)
    }

    /// Removes an agreement for good, on all hosts to which this one's agent can tell it.
    ///
    /// # Errors
    /// Those of [`Self::get`]; [`GroupError::Io`] if a file cannot be written or removed.
    pub fn remove(&self, name: &Group) -> Result<(), GroupError> {
        let _lock = self.lock()?;
        let key = self.get(name)?.key_id()?;
        self.mark_removed(name, key)?;
        self.delete(name)
    }

    /// Returns the agreement of a group that a region is about to join; `None` if this host has
    /// none.
    ///
    /// # Errors
    /// Those of [`Self::find`], and [`GroupError::Removed`] if an operator removed it.
    pub fn to_join(&self, name: &Group) -> Result<Option<Agreement>, GroupError> {
        let Some(agreement) = self.find(name)? else { return Ok(None) };
        match self.mark(name, agreement.key_id()?).exists() {
            true => Err(GroupError::Removed(name.clone())),
            false => Ok(Some(agreement)),
        }
    }

    /// Reads all agreements, gives a version to those that an operator changed, above those that
    /// `catalog` knows, and deletes those
    /// that an operator removed on another host and that no region in `regions` needs.
    ///
    /// # Errors
    /// [`GroupError::Io`] if the directory cannot be read, or a version cannot be written.
    pub fn survey(
        &self,
        own: &HostName,
        regions: &Path,
        catalog: &Catalog,
    ) -> Result<Survey, GroupError> {
        let mut survey = Survey::default();
        if !self.directory().exists() {
            return Ok(survey);
        }
        let _lock = self.lock()?;
        survey.removed = self.marks()?;
        for (name, agreement) in self.each()? {
            let held = agreement.and_then(|agreement| self.held(own, agreement, catalog));
            let held = match held {
                Err(error) => {
                    tracing::debug!(group = %name, "cannot read its agreement: {error}");
                    survey.unreadable.insert(name);
                    continue;
                }
                Ok(held) => held,
            };
            if survey.removed.contains(&(name.clone(), held.key)) && !has_regions(regions, &name)? {
                self.delete(&name)?;
            } else {
                survey.held.insert(name, held);
            }
        }
        Ok(survey)
    }

    /// Notes that an operator removed the agreement with this key on another host. The next
    /// [`survey`](Self::survey) deletes it here.
    ///
    /// # Errors
    /// [`GroupError::Io`] if that cannot be written.
    pub fn forget(&self, name: &Group, key: KeyId) -> Result<(), GroupError> {
        let _lock = self.lock()?;
        self.mark_removed(name, key)
    }

    /// Takes an agreement that another host gave, in place of an older version. Returns whether it
    /// was of use.
    ///
    /// # Errors
    /// [`GroupError::Tampered`] if it is not what that host announced; [`GroupError::Malformed`] if
    /// this host has a file that is no agreement; [`GroupError::Io`] if it cannot be written.
    /// Nothing has changed then.
    pub fn take(
        &self,
        own: &HostName,
        offered: Offered,
        catalog: &Catalog,
    ) -> Result<bool, GroupError> {
        let Offered { agreement, announced: (key, edition), by, from } = offered;
        let name = agreement.name.clone();
        let wrong = |why| Err(GroupError::Tampered { name: name.clone(), from: from.clone(), why });
        if agreement.key_id()? != key {
            return wrong("it has another key");
        }
        if agreement.hash()? != edition.hash {
            return wrong("it has other terms");
        }
        let _lock = self.lock()?;
        if self.mark(&name, key).exists() {
            return Ok(false);
        }
        if let Some(here) = self.find(&name)? {
            let here = self.held(own, here, catalog)?;
            if here.key != key || here.edition >= edition {
                return Ok(false);
            }
        }
        self.write(&agreement)?;
        // If this host dies in between, the file counts as edited here. It gets a version for the
        // same content then, and all hosts take the higher one.
        self.write_record(&name, &Record { key, edition, by })?;
        Ok(true)
    }

    /// Returns an agreement with its version, which is a new one if an operator changed the file.
    /// The version is above all that this host knows of, so a change ends what a host that lied
    /// began.
    fn held(
        &self,
        own: &HostName,
        agreement: Agreement,
        catalog: &Catalog,
    ) -> Result<Held, GroupError> {
        let (key, hash) = (agreement.key_id()?, agreement.hash()?);
        let before = self.record(&agreement.name).filter(|record| record.key == key);
        let record = match before {
            Some(record) if record.edition.hash == hash => record,
            before => {
                let known = match catalog.line(&agreement.name, key).map(|line| line.state) {
                    Some(State::Agreed(known)) if known.hash != hash => known.version,
                    _ => 0,
                };
                let before = before.map_or(0, |record| record.edition.version);
                let version = before.max(known).saturating_add(1);
                let edition = Edition { version, hash };
                let record = Record { key, edition, by: own.clone() };
                self.write_record(&agreement.name, &record)?;
                record
            }
        };
        let Record { edition, by, .. } = record;
        Ok(Held { agreement, key, edition, by })
    }

    fn record(&self, name: &Group) -> Option<Record> {
        serde_json::from_slice(&fs::read(self.record_file(name)).ok()?).ok()
    }

    fn write_record(&self, name: &Group, record: &Record) -> Result<(), GroupError> {
        let path = self.record_file(name);
        let text = serde_json::to_vec(record).map_err(io::Error::other);
        let written = text.and_then(|text| file::replace_durably(&path, &text));
        written.map_err(|source| GroupError::Io { what: "writing", path, source })
    }

    fn record_file(&self, name: &Group) -> PathBuf {
        self.directory().join(format!("{name}.edition"))
    }

    fn mark(&self, name: &Group, key: KeyId) -> PathBuf {
        self.directory().join(format!("{name}.{key}.removed"))
    }

    fn mark_removed(&self, name: &Group, key: KeyId) -> Result<(), GroupError> {
        let path = self.mark(name, key);
        let written = file::replace_durably(&path, b"");
        written.map_err(|source| GroupError::Io { what: "writing", path, source })
    }

    fn marks(&self) -> Result<BTreeSet<(Group, KeyId)>, GroupError> {
        let path = self.directory().to_owned();
        let fail = |source| GroupError::Io { what: "listing", path: path.clone(), source };
        let mut marks = BTreeSet::new();
        for entry in fs::read_dir(&path).map_err(fail)? {
            let file = entry.map_err(fail)?.file_name();
            let mark = || {
                let (name, key) = file.to_str()?.strip_suffix(".removed")?.rsplit_once('.')?;
                Some((name.parse().ok()?, key.parse().ok()?))
            };
            marks.extend(mark());
        }
        Ok(marks)
    }

    /// Deletes a group's agreement and its record.
    fn delete(&self, name: &Group) -> Result<(), GroupError> {
        for path in [self.file(name), self.record_file(name)] {
            match fs::remove_file(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                removed => {
                    removed.map_err(|source| GroupError::Io { what: "removing", path, source })?
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::os::unix::fs::PermissionsExt as _;

    use aquifer_control::group::agreements::{Line, TermsHash};

    use super::*;
    use crate::agreement::GroupEncryption;

    /// The agreements of a host in a temporary directory.
    struct Host {
        name: HostName,
        all: Agreements,
        regions: PathBuf,
    }

    impl Host {
        fn new(dir: &tempfile::TempDir, name: &str) -> Self {
            let all = Agreements::of(&dir.path().join(name).join("groups"));
            let regions = dir.path().join(name).join("regions");
            Self { name: name.parse().unwrap(), all, regions }
        }

        fn survey(&self) -> Survey {
            self.all.survey(&self.name, &self.regions, &Catalog::default()).unwrap()
        }

        fn held(&self) -> Held {
            self.survey().held.remove(&blue()).unwrap()
        }

        /// Gives what this host has to another one, after a change on the way.
        fn give(&self, to: &Self, change: impl FnOnce(&mut Offered)) -> Result<bool, GroupError> {
            let Held { agreement, key, edition, by } = self.held();
            let from = self.name.clone();
            let mut offered = Offered { agreement, announced: (key, edition), by, from };
            change(&mut offered);
            to.all.take(&to.name, offered, &Catalog::default())
        }

        /// Returns all files with their content.
        fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
            let entries = fs::read_dir(self.all.directory()).into_iter().flatten();
            let paths = entries.map(|entry| entry.unwrap().path());
            paths.map(|path| (path.clone(), fs::read(path).unwrap())).collect()
        }
    }

    fn blue() -> Group {
        "blue".parse().unwrap()
    }

    fn made() -> Agreement {
        Agreement::new(blue(), GroupEncryption::Deterministic)
    }

    /// Changes the file as an operator does.
    fn edit(host: &Host, members: &str) {
        let agreement = Agreement { members: vec![members.to_owned()], ..host.held().agreement };
        let _lock = host.all.lock().unwrap();
        host.all.change(&agreement).unwrap();
    }

    #[test]
    fn each_change_of_the_file_is_a_version() {
        let dir = tempfile::tempdir().unwrap();
        let a = Host::new(&dir, "a");
        assert_eq!(a.survey(), Survey::default());
        a.all.create(&made()).unwrap();
        assert_eq!(a.held().edition.version, 1);
        assert_eq!(a.held(), a.held());
        edit(&a, "web");
        assert_eq!(a.held().edition.version, 2);
        // The version is lost, and the content is not.
        fs::remove_file(a.all.record_file(&blue())).unwrap();
        assert_eq!(a.held().edition.version, 1);
        // A host lied that there is a later one.
        edit(&a, "db");
        let state = State::Agreed(Edition { version: 40, hash: TermsHash(1) });
        let line = Line { state, by: a.name.clone(), hosts: Vec::new() };
        let mut catalog = Catalog::default();
        catalog.merge(&blue(), a.held().key, line);
        edit(&a, "web");
        let held = a.all.survey(&a.name, &a.regions, &catalog).unwrap().held;
        assert_eq!(held[&blue()].edition.version, 41);
        // Another key is another group.
        fs::remove_file(a.all.file(&blue())).unwrap();
        a.all.create(&made()).unwrap();
        assert_eq!(a.held().edition.version, 1);
        for path in a.files().into_keys() {
            let mode = fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{}", path.display());
        }
    }

    #[test]
    fn an_agreement_goes_to_another_host_once() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| Host::new(&dir, name));
        a.all.create(&made()).unwrap();
        assert!(a.give(&b, |_| ()).unwrap());
        assert_eq!(a.held(), b.held());
        assert!(!a.give(&b, |_| ()).unwrap(), "it comes twice");
        edit(&b, "web");
        assert!(!a.give(&b, |_| ()).unwrap(), "it comes late");
        assert!(b.give(&a, |_| ()).unwrap());
        assert_eq!((a.held(), a.held().by), (b.held(), b.name.clone()));
        // Two operators at once: both hosts end with the same.
        edit(&a, "one");
        edit(&b, "two");
        assert!(a.give(&b, |_| ()).unwrap() != b.give(&a, |_| ()).unwrap());
        assert_eq!(a.held(), b.held());
    }

    #[test]
    fn a_changed_agreement_is_refused_and_no_file_changes() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| Host::new(&dir, name));
        a.all.create(&made()).unwrap();
        edit(&a, "web");
        let terms = |offered: &mut Offered| offered.agreement.lends = true;
        let key = |offered: &mut Offered| offered.agreement.key = made().key;
        for before in [false, true] {
            let files = b.files();
            let refused = a.give(&b, terms).unwrap_err().to_string();
            assert!(refused.contains("host a") && refused.contains("other terms"), "{refused}");
            let refused = a.give(&b, key).unwrap_err().to_string();
            assert!(refused.contains("another key"), "{refused}");
            assert_eq!(b.files(), files);
            if !before {
                assert!(a.give(&b, |_| ()).unwrap());
                edit(&a, "web-*");
            }
        }
    }

    #[test]
    fn another_key_never_replaces_that_of_this_host() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| Host::new(&dir, name));
        for host in [&a, &b] {
            host.all.create(&made()).unwrap();
            host.survey();
        }
        edit(&a, "web");
        a.survey();
        let files = b.files();
        assert!(!a.give(&b, |_| ()).unwrap());
        fs::write(b.all.file(&blue()), "name = ").unwrap();
        a.give(&b, |_| ()).unwrap_err();
        assert_eq!(fs::read_to_string(b.all.file(&blue())).unwrap(), "name = ");
        assert_eq!(b.survey().unreadable.len(), 1);
        assert_eq!(b.files().len(), files.len());
    }

    #[test]
    fn a_removed_agreement_does_not_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| Host::new(&dir, name));
        a.all.create(&made()).unwrap();
        let held = a.held();
        b.all.forget(&blue(), held.key).unwrap();
        assert!(!a.give(&b, |_| ()).unwrap());
        a.all.remove(&blue()).unwrap();
        assert!(a.survey().held.is_empty() && a.survey().removed.len() == 1);
        // A backup, or a host that died between the two steps of the removal.
        a.all.create(&held.agreement).unwrap();
        assert!(matches!(a.all.to_join(&blue()), Err(GroupError::Removed(_))));
        assert!(a.survey().held.is_empty() && !a.all.file(&blue()).exists());
        a.all.create(&made()).unwrap();
        assert!(a.give(&b, |_| ()).unwrap());
        assert!(b.all.to_join(&blue()).unwrap().is_some());
    }
}
