//! A test that holds each crate to the table of rooms in ARCHITECTURE.md.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The rooms that the code of a room may use, and those that only its tests and examples may use.
#[derive(Default)]
struct Uses {
    code: BTreeSet<String>,
    tests: BTreeSet<String>,
}

impl Uses {
    fn all(&self) -> BTreeSet<String> {
        &self.code | &self.tests
    }
}

/// Reads the names of rooms from a list with commas.
fn names(list: &str) -> BTreeSet<String> {
    list.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// Reads from the table which rooms each room may use; "all above" means the rooms of all earlier
/// lines. Those after "tests:" are for tests and examples.
fn allowed() -> BTreeMap<String, Uses> {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let rows = text
        .lines()
        .skip_while(|line| *line != "## Rooms")
        .skip_while(|line| !line.starts_with("|---"))
        .skip(1)
        .take_while(|l| l.starts_with('|'));
    let mut rooms = BTreeMap::new();
    let mut above = BTreeSet::new();
    for row in rows {
        let cells: Vec<_> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [room, _, uses] = cells[..] else { panic!("not three cells: {row}") };
        let (code, tests) = uses.split_once("; tests:").unwrap_or((uses, ""));
        let code = if code == "all above" { above.clone() } else { names(code) };
        let uses = Uses { code, tests: names(tests) };
        for used in uses.all() {
            assert!(
                above.contains(&used),
                "the arrow from {room} to {used} does not point upwards"
            );
        }
        above.insert(room.to_owned());
        rooms.insert(room.to_owned(), uses);
    }
    rooms
}

/// Returns the rooms that a crate's manifest names, for its code and for its tests and examples.
fn used(manifest: &Path) -> Uses {
    let manifest: toml::Table = fs::read_to_string(manifest).unwrap().parse().unwrap();
    let named = |sections: &[&str]| {
        let tables = sections.iter().filter_map(|section| manifest.get(*section)?.as_table());
        let crates = tables.flat_map(|table| table.keys());
        crates.filter_map(|name| name.strip_prefix("aquifer-").map(str::to_owned)).collect()
    };
    Uses {
        code: named(&["dependencies", "build-dependencies"]),
        tests: named(&["dev-dependencies"]),
    }
}

/// Reads the rows of the drawing of rooms, top first. A row begins with eight columns or fewer
/// and names rooms until the column of its explanation.
fn drawing(rooms: &BTreeSet<String>) -> Vec<BTreeSet<String>> {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    text.lines()
        .skip_while(|line| *line != "## Rooms")
        .skip_while(|line| *line != "```text")
        .skip(1)
        .take_while(|line| *line != "```")
        .filter(|line| !line.contains('│'))
        .map(|line| {
            let (names, _) = line.split_at_checked(41).unwrap_or((line, ""));
            let row: BTreeSet<_> = names.split_whitespace().map(str::to_owned).collect();
            assert!(row.is_subset(rooms), "the drawing names rooms that do not exist: {line}");
            row
        })
        .collect()
}

#[test]
fn the_drawing_has_every_room_above_those_it_uses() {
    let allowed = allowed();
    let rows = drawing(&allowed.keys().cloned().collect());
    let place = |room: &String| {
        let at = rows.iter().position(|row| row.contains(room));
        at.unwrap_or_else(|| panic!("the drawing in ARCHITECTURE.md lacks {room}"))
    };
    for (room, uses) in &allowed {
        for used in &uses.all() {
            assert!(place(room) < place(used), "the drawing has {room} not above {used}");
        }
    }
}

#[test]
fn every_crate_uses_only_rooms_that_the_architecture_allows() {
    let allowed = allowed();
    let mut crates = BTreeSet::new();
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let dir = entry.unwrap().path();
        let room = dir.file_name().unwrap().to_str().unwrap().to_owned();
        let Some(may_use) = allowed.get(&room) else {
            panic!("ARCHITECTURE.md has no line for crates/{room}")
        };
        let uses = used(&dir.join("Cargo.toml"));
        let code = uses.code.difference(&may_use.code);
        let surplus: Vec<_> = code.cloned().chain(&uses.tests - &may_use.all()).collect();
        assert!(
            surplus.is_empty(),
            "crates/{room} uses {surplus:?}, which ARCHITECTURE.md does not give it"
        );
        crates.insert(room);
    }
    let rooms: BTreeSet<_> = allowed.into_keys().collect();
    assert_eq!(rooms, crates, "the rooms of ARCHITECTURE.md and the folders under crates/ differ");
}
