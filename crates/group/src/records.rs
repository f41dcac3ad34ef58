//! What a host remembers of its agreements, in files beside them.
//!
//! - `GROUP.toml`: the agreement. An operator may edit it.
//! - `GROUP.edition`: the version of that content. If the content is another one, an operator has
//!   changed it, and it gets the next version.
//! - `GROUP.KEY.removed`: an operator removed the agreement with the key of this id, here or on
//!   another host. It stays for good, so that no host that was away brings the agreement back.
//! - `GROUP.KEY.toml.removed`: that agreement. The removal may be a mistake or a lie, and this may
//!   be the only copy of the key.
//!
//! Each writer holds a lock on the directory: the command line and the agent both write.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use aquifer_control::group::agreements::{Catalog, Edition, KeyId, TermsHash};
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
    /// The latest version that this host has heard of. While it lacks that version, edits of the
    /// file hold here only.
    #[serde(default)]
    latest: Option<Edition>,
}

impl Record {
    fn is_latest(&self) -> bool {
        self.latest <= Some(self.edition)
    }
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
    /// Whether this host has heard of no later version.
    pub is_latest: bool,
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
    /// What an operator should know of groups.
    pub problems: Vec<(Group, String)>,
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
        self.set_aside(name, key)
    }

    /// Returns the agreement of a group that a region is about to join; `None` if this host has
    /// none.
    ///
    /// # Errors
    /// Those of [`Self::find`], and [`GroupError::Removed`] if an operator removed it.
    pub fn to_join(&self, name: &Group) -> Result<Option<Agreement>, GroupError> {
        let agreement = self.find(name)?;
        let is_removed = match &agreement {
            Some(agreement) => self.mark(name, agreement.key_id()?).exists(),
            // Without an agreement, any region may be in the default group.
            None if *name == Group::default() => false,
            None => self.marks()?.iter().any(|(group, _)| group == name),
        };
        if is_removed { Err(GroupError::Removed(name.clone())) } else { Ok(agreement) }
    }

    /// Reads all agreements. Gives a changed file the next version, if this host had the latest one
    /// that `catalog` knows. Sets aside those that were removed and that no region needs.
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
            let (held, problem) = match held {
                Err(error) => {
                    survey.problems.push((name.clone(), error.to_string()));
                    survey.unreadable.insert(name);
                    continue;
                }
                Ok(held) => held,
            };
            let key = held.key;
            if survey.removed.contains(&(name.clone(), key)) && !has_regions(regions, &name)? {
                self.set_aside(&name, key)?;
                survey.problems.push((name.clone(), self.is_set_aside(&name, key)));
            } else {
                survey.problems.extend(problem.map(|problem| (name.clone(), problem)));
                survey.held.insert(name, held);
            }
        }
        Ok(survey)
    }

    fn is_set_aside(&self, name: &Group, key: KeyId) -> String {
        format!(
            "it is removed, and its agreement is now {}. To use its key again, copy that to {}, \
             and change 'name' in it to NEW",
            self.aside(name, key).display(),
            self.directory().join("NEW.toml").display()
        )
    }

    /// Notes that an operator removed the agreement with this key on another host. The next
    /// [`survey`](Self::survey) sets it aside here.
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
    /// [`GroupError::Tampered`] if it is not what that host announced; [`GroupError::Weaker`] if it
    /// weakens the encryption; [`GroupError::Malformed`] if this host has a file that is no
    /// agreement; [`GroupError::Io`] if it cannot be written.
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
            let (here, _) = self.held(own, here, catalog)?;
            if here.key != key || here.edition >= edition {
                return Ok(false);
            }
            let (is, was) = (agreement.encryption, here.agreement.encryption);
            if is.is_weaker_than(was) {
                return Err(GroupError::Weaker { name, from, was, is });
            }
        }
        self.write(&agreement)?;
        // If this host dies in between, the file counts as edited here. It gets a version for the
        // same content then, and all hosts take the higher one.
        self.write_record(&name, &Record { key, edition, by, latest: Some(edition) })?;
        Ok(true)
    }

    /// Lets the next change of the file replace `latest`, a version by `by` that this host lacks.
    /// The caller holds the lock of [`Agreements::lock`].
    ///
    /// # Errors
    /// Those of [`Self::get`]; [`GroupError::Io`] if that cannot be written.
    pub fn overrule(&self, name: &Group, latest: Edition, by: HostName) -> Result<(), GroupError> {
        let key = self.get(name)?.key_id()?;
        let record = self.record(name).filter(|record| record.key == key);
        let known = record.and_then(|record| record.latest).unwrap_or(latest);
        let edition = latest.max(known);
        self.write_record(name, &Record { key, edition, by, latest: Some(edition) })
    }

    /// Returns an agreement with its version, which is a new one if an operator changed the file.
    /// Without the latest version here, the change gets none, and a problem is returned: it would
    /// undo terms that this host does not know, or those that exclude this host.
    fn held(
        &self,
        own: &HostName,
        agreement: Agreement,
        catalog: &Catalog,
    ) -> Result<(Held, Option<String>), GroupError> {
        let (name, key, hash) = (&agreement.name, agreement.key_id()?, agreement.hash()?);
        let before = self.record(name).filter(|record| record.key == key);
        let none = Edition { version: 0, hash: TermsHash(0) };
        let none = || Record { key, edition: none, by: own.clone(), latest: None };
        let mut record = before.clone().unwrap_or_else(none);
        let latest = catalog.latest(name, key).filter(|latest| *latest > record.edition);
        let by = catalog.line(name, key).map(|line| line.by.clone());
        record.latest = record.latest.max(latest);
        if let (Some(edition), Some(by)) = (latest.filter(|latest| latest.hash == hash), &by) {
            (record.edition, record.by) = (edition, by.clone());
        }
        let is_edited = record.edition.hash != hash;
        if is_edited && record.is_latest() {
            let version = record.edition.version.saturating_add(1);
            (record.edition, record.by) = (Edition { version, hash }, own.clone());
        }
        if before.as_ref() != Some(&record) {
            self.write_record(name, &record)?;
        }
        let is_latest = record.is_latest();
        let problem = (is_edited && !is_latest).then(|| {
            let by = by.map(|by| format!(", made on host {by}")).unwrap_or_default();
            format!(
                "its file changed here, but this host lacks the latest version{by}. The change is \
                 not sent to other hosts. To replace that version, run 'aquifer group set {name} \
                 --force' with the change"
            )
        });
        let Record { edition, by, .. } = record;
        Ok((Held { agreement, key, edition, by, is_latest }, problem))
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
        if !path.exists() {
            return Ok(marks);
        }
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

    /// Returns the path to which a removed agreement goes.
    pub fn aside(&self, name: &Group, key: KeyId) -> PathBuf {
        self.directory().join(format!("{name}.{key}.toml.removed"))
    }

    /// Sets a group's agreement aside, and deletes its record.
    fn set_aside(&self, name: &Group, key: KeyId) -> Result<(), GroupError> {
        let (path, aside) = (self.file(name), self.aside(name, key));
        let moved = fs::set_permissions(&path, Permissions::from_mode(0o600));
        let moved = moved.and_then(|()| fs::rename(&path, aside));
        moved.map_err(|source| GroupError::Io { what: "setting aside", path, source })?;
        let path = self.record_file(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(|source| GroupError::Io { what: "removing", path, source }),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use aquifer_control::group::agreements::{Line, State};

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
            let Held { agreement, key, edition, by, .. } = self.held();
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
    fn a_change_wins_only_where_the_latest_version_is() {
        let dir = tempfile::tempdir().unwrap();
        let a = Host::new(&dir, "a");
        a.all.create(&made()).unwrap();
        let first = a.held();
        // Another host made a version, or lied that it did. This host has heard of it.
        let latest = Edition { version: 40, hash: TermsHash(1) };
        let line =
            Line { state: State::Agreed(latest), by: "b".parse().unwrap(), hosts: Vec::new() };
        let mut catalog = Catalog::default();
        assert!(catalog.merge(&blue(), first.key, line));
        let survey = a.all.survey(&a.name, &a.regions, &catalog).unwrap();
        assert!(!survey.held[&blue()].is_latest && survey.problems.is_empty());
        edit(&a, "web");
        // Also after the agent has forgotten what it heard.
        for known in [&catalog, &Catalog::default()] {
            let survey = a.all.survey(&a.name, &a.regions, known).unwrap();
            let held = &survey.held[&blue()];
            assert_eq!((held.edition, held.is_latest), (first.edition, false));
            assert!(survey.problems[0].1.contains("--force"), "{survey:?}");
        }
        // A copy of an old file wins no more than an edit.
        fs::remove_file(a.all.record_file(&blue())).unwrap();
        let survey = a.all.survey(&a.name, &a.regions, &catalog).unwrap();
        assert_eq!((survey.held[&blue()].edition.version, survey.problems.len()), (0, 1));
        a.all.overrule(&blue(), latest, "b".parse().unwrap()).unwrap();
        let survey = a.all.survey(&a.name, &a.regions, &catalog).unwrap();
        let held = &survey.held[&blue()];
        assert_eq!((held.edition.version, held.is_latest, &held.by), (41, true, &a.name));
        assert!(survey.problems.is_empty());
    }

    #[test]
    fn no_other_host_weakens_the_encryption() {
        use GroupEncryption::{Deterministic, Off, Random};
        let dir = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| Host::new(&dir, name));
        a.all.create(&Agreement::new(blue(), Off)).unwrap();
        assert!(a.give(&b, |_| ()).unwrap());
        let encrypt = |encryption| {
            a.all.write(&Agreement { encryption, ..a.held().agreement }).unwrap();
            a.give(&b, |_| ())
        };
        for stronger in [Deterministic, Random] {
            assert!(encrypt(stronger).unwrap());
        }
        for weaker in [Deterministic, Off] {
            let refused = encrypt(weaker).unwrap_err().to_string();
            assert!(refused.contains(&format!("from random to {weaker}")), "{refused}");
            assert_eq!(b.held().agreement.encryption, Random);
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
        assert!(matches!(b.all.to_join(&blue()), Err(GroupError::Removed(_))), "without a file");
        b.all.forget(&Group::default(), held.key).unwrap();
        assert!(b.all.to_join(&Group::default()).unwrap().is_none());
        a.all.remove(&blue()).unwrap();
        assert!(a.survey().held.is_empty() && a.survey().removed.len() == 1);
        // A backup, or a host that died between the two steps of the removal.
        a.all.create(&held.agreement).unwrap();
        assert!(matches!(a.all.to_join(&blue()), Err(GroupError::Removed(_))));
        fs::set_permissions(a.all.file(&blue()), Permissions::from_mode(0o644)).unwrap();
        // A region whose record cannot be read may be the group's.
        fs::create_dir_all(a.regions.join(".one")).unwrap();
        fs::write(a.regions.join(".one/record.json"), "").unwrap();
        assert!(a.survey().held.contains_key(&blue()));
        fs::remove_dir_all(&a.regions).unwrap();
        let survey = a.survey();
        assert!(survey.held.is_empty() && !a.all.file(&blue()).exists());
        // The key is still there.
        let aside = a.all.aside(&blue(), held.key);
        assert!(survey.problems[0].1.contains(&aside.display().to_string()), "{survey:?}");
        let kept = Agreement::from_text(&fs::read_to_string(&aside).unwrap()).unwrap();
        assert_eq!(kept, held.agreement);
        assert_eq!(fs::metadata(&aside).unwrap().permissions().mode() & 0o777, 0o600);
        a.all.create(&made()).unwrap();
        assert!(a.give(&b, |_| ()).unwrap());
        assert!(b.all.to_join(&blue()).unwrap().is_some());
    }
}
