//! Tests of definitions: their files, their locks, and their marks while VMs move.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::thread;

use aquifer_page::Bytes;

use super::*;
use crate::migrate::{HandedOver, Incoming};
use crate::process::Files;
use crate::{Backing, VmSpec};

fn name(name: &str) -> RegionName {
    name.parse().unwrap()
}

fn definition(of: &str) -> Definition {
    Definition::new(name(of), "memory = '8G'\ncpus = 4\ndisk = ['/a']".parse().unwrap())
}

/// A host with a directory of definitions.
struct Host {
    dir: tempfile::TempDir,
    definitions: Definitions,
}

impl Host {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let definitions = Definitions::of(&dir.path().join("lib/vms"));
        Self { dir, definitions }
    }

    fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// Makes the record and the monitor of a VM that was started from its definition.
    fn run(&self, vm: &str, incoming: Option<Incoming>) -> (Files, UnixListener) {
        let files = Files::new(&self.run_dir(), &name(vm));
        let spec = VmSpec::new(name(vm), Bytes::mib(64), Backing::Region);
        files.make_record(&spec, &self.definitions.file(&name(vm)), incoming).unwrap();
        let qemu = UnixListener::bind(files.control()).unwrap();
        (files, qemu)
    }

    fn starts(&self, vm: &str) -> bool {
        let found = self.definitions.find(&name(vm)).unwrap();
        found.is_some_and(|definition| definition.elsewhere.is_none())
    }
}

fn incoming(migration: MigrationId, from: &str) -> Incoming {
    let (from, listen) = (from.parse().unwrap(), [127, 0, 0, 1].into());
    let (identity, prepared) = (PathBuf::new(), true);
    Incoming { migration, from, listen, identity, prepared, left_at_source: None, cpu: None }
}

fn handed_over(migration: MigrationId, to: &str) -> HandedOver {
    HandedOver { migration, to: to.parse().unwrap(), left_at_source: None, defined: true }
}

#[test]
fn a_definition_is_written_read_changed_and_removed() {
    let host = Host::new();
    let all = &host.definitions;
    assert!(all.names().unwrap().is_empty() && all.find(&name("db")).unwrap().is_none());
    assert!(matches!(all.get(&name("db")), Err(DefinitionError::Unknown { .. })));
    let held = all.hold(&name("db")).unwrap();
    held.create(&definition("db")).unwrap();
    let again = held.create(&definition("db")).unwrap_err().to_string();
    assert!(again.contains("db.toml") && again.contains("aquifer vm rm db"), "{again}");
    assert_eq!(fs::metadata(held.file()).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(all.get(&name("db")).unwrap(), definition("db"));
    let changed = Definition { autostart: false, restart: Policy::Always, ..definition("db") };
    held.write(&changed).unwrap();
    assert_eq!(held.get().unwrap(), changed);
    let text = fs::read_to_string(held.file()).unwrap();
    assert!(text.starts_with("# The definition of VM 'db'."), "{text}");
    assert!(text.contains("restart = \"always\"") && text.contains("\n[vm]\n"), "{text}");
    assert!(text.lines().all(|line| line.len() <= 100), "{text}");
    held.remove().unwrap();
    assert_eq!(fs::read_dir(all.dir()).unwrap().count(), 0);
}

#[test]
fn a_damaged_definition_is_named_and_others_are_read() {
    let host = Host::new();
    let held = host.definitions.hold(&name("db")).unwrap();
    held.create(&definition("db")).unwrap();
    for (text, says) in [
        ("version = 1\nname = 'web'\nautostrat = true", "autostrat"),
        ("version = 1\nname = 'web'\nrestart = 'never'", "never"),
        ("version = 1\nname = 'db'", "it is the definition of 'db'"),
        ("version = 2\nname = 'web'\nnew = 1", "its version is 2"),
        ("name = 'web'", "version"),
        ("", "version"),
        ("version", "line 1"),
    ] {
        fs::write(host.definitions.file(&name("web")), text).unwrap();
        let each = host.definitions.each().unwrap();
        let [(first, sound), (second, damaged)] = &each[..] else { panic!("{each:?}") };
        assert_eq!((first.as_str(), second.as_str()), ("db", "web"));
        assert!(sound.is_ok(), "{sound:?}");
        let error = damaged.as_ref().unwrap_err().to_string();
        assert!(error.contains("web.toml") && error.contains(says), "{error}");
        let way_out = if text.contains('2') { "a newer Aquifer" } else { "aquifer vm rm web" };
        assert!(error.contains(way_out), "{error}");
    }
}

#[test]
fn one_process_at_a_time_holds_a_definition() {
    let host = Host::new();
    let all = &host.definitions;
    let held = all.hold(&name("db")).unwrap();
    assert!(all.is_held(&name("db")) && !all.is_held(&name("web")));
    let definitions = all.clone();
    let second = thread::spawn(move || {
        let held = definitions.hold(&name("db")).unwrap();
        held.create(&definition("db"))
    });
    held.create(&definition("db")).unwrap();
    assert!(!second.is_finished());
    // The second holder finds that the lock is gone with the definition, and makes its own.
    held.remove().unwrap();
    second.join().unwrap().unwrap();
    assert_eq!(all.get(&name("db")).unwrap(), definition("db"));
}

#[test]
fn at_each_step_of_a_move_at_most_one_host_starts_the_vm() {
    let (a, b) = (Host::new(), Host::new());
    let migration = MigrationId::random();
    a.definitions.hold(&name("db")).unwrap().create(&definition("db")).unwrap();
    let (source, _qemu) = a.run("db", None);
    let text = text(&source).unwrap().unwrap();

    let arriving = incoming(migration, "a");
    let (destination, _other) = b.run("db", Some(arriving.clone()));
    b.definitions.expect(&name("db"), &arriving, &text).unwrap();
    assert!(a.starts("db") && !b.starts("db"));
    settle(&destination);
    assert!(!b.starts("db"), "the source owns the VM");

    let held = hold(&source).unwrap().unwrap();
    held.leave(&handed_over(migration, "b")).unwrap();
    assert!(!a.starts("db") && !b.starts("db"));
    source.set_handed_over(Some(handed_over(migration, "b"))).unwrap();
    held.settle(&source).unwrap();
    assert!(!a.starts("db"), "too late to stay");
    drop(held);

    destination.take_over().unwrap();
    settle(&destination);
    assert!(!a.starts("db") && b.starts("db"));
    let arrived = Definition { moves: 1, ..definition("db") };
    assert_eq!(b.definitions.get(&name("db")).unwrap(), arrived);
    assert_eq!(a.definitions.get(&name("db")).unwrap().moves, 1, "if it starts here by force");
    remove_moved(&source, &handed_over(MigrationId::random(), "b"));
    assert!(a.definitions.find(&name("db")).unwrap().is_some(), "another attempt's");
    remove_moved(&source, &handed_over(migration, "b"));
    assert!(a.definitions.find(&name("db")).unwrap().is_none());
}

#[test]
fn the_number_of_a_numa_node_stays_on_its_host() {
    for (node, moves) in [("3", false), ("'auto'", false), ("'any'", true)] {
        let host = Host::new();
        let options = format!("memory = '8G'\nnode = {node}").parse().unwrap();
        let definition = Definition::new(name("db"), options);
        host.definitions.hold(&name("db")).unwrap().create(&definition).unwrap();
        let (source, _qemu) = host.run("db", None);
        let text = text(&source).unwrap().unwrap();
        assert!(text.contains("8G") && text.contains("node") == moves, "{text}");
    }
}

#[test]
fn a_move_that_fails_leaves_the_definition_at_the_source() {
    let (a, b) = (Host::new(), Host::new());
    let migration = MigrationId::random();
    a.definitions.hold(&name("db")).unwrap().create(&definition("db")).unwrap();
    let (source, _qemu) = a.run("db", None);
    let held = hold(&source).unwrap().unwrap();
    held.leave(&handed_over(migration, "b")).unwrap();
    held.settle(&source).unwrap();
    assert!(a.starts("db"));

    let arriving = incoming(migration, "a");
    let text = definition("db").text().unwrap();
    b.definitions.expect(&name("db"), &arriving, &text).unwrap();
    // A later attempt replaces what is marked.
    let later = incoming(MigrationId::random(), "a");
    b.definitions.expect(&name("db"), &later, &text).unwrap();
    b.definitions.remove_expected(&name("db"), &arriving);
    assert!(b.definitions.find(&name("db")).unwrap().is_some(), "the later attempt's");
    b.definitions.remove_expected(&name("db"), &later);
    assert!(b.definitions.find(&name("db")).unwrap().is_none());

    b.definitions.hold(&name("db")).unwrap().create(&definition("db")).unwrap();
    let refused = b.definitions.expect(&name("db"), &arriving, &text).unwrap_err();
    assert!(matches!(refused, DefinitionError::Exists { .. }), "{refused}");
    b.definitions.remove_expected(&name("db"), &arriving);
    assert!(b.starts("db"), "a VM of this host");
}
