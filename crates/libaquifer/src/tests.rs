//! Checks that the header agrees with the library.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeMap;
use std::mem::{offset_of, size_of};
use std::path::Path;
use std::process::Command;

use aquifer_page::PAGE_SIZE;
use aquifer_region::process::PageState;

use crate::{Extent, Metadata};

const HEADER: &str = include_str!("../include/aquifer.h");

/// Returns the page states that the header names, with their numbers.
fn states() -> BTreeMap<&'static str, u8> {
    let body =
        HEADER.split_once("enum aquifer_page_state {").unwrap().1.split_once("};").unwrap().0;
    let entries =
        body.lines().filter_map(|line| line.trim().strip_prefix("AQUIFER_")?.split_once(" = "));
    let number = |rest: &str| rest.split([',', ' ']).next().unwrap().parse().unwrap();
    entries.map(|(name, rest)| (name, number(rest))).collect()
}

#[test]
fn the_header_has_every_state_of_a_page_by_its_number() {
    use PageState::{Dirty, Remote, Resident, Shared, Zero};
    let all = [Zero, Remote, Resident, Dirty, Shared];
    let named = all.map(|state| {
        // The match fails to compile when a state is added.
        let name = match state {
            Zero => "ZERO",
            Remote => "REMOTE",
            Resident => "RESIDENT",
            Dirty => "DIRTY",
            Shared => "SHARED",
        };
        (name, state as u8)
    });
    assert_eq!(states(), BTreeMap::from(named));
    assert!(HEADER.contains(&format!("#define AQUIFER_PAGE_STATES {}\n", all.len())));
    assert!(HEADER.contains(&format!("#define AQUIFER_PAGE_SIZE {PAGE_SIZE}\n")));
}

#[test]
fn structures_are_in_c_as_they_are_here() {
    let mut facts = vec![
        format!("sizeof(struct aquifer_metadata) == {}", size_of::<Metadata>()),
        format!("sizeof(struct aquifer_extent) == {}", size_of::<Extent>()),
    ];
    macro_rules! offsets {
        ($name:literal, $structure:ty: $($field:ident)*) => {
            $(facts.push(format!(
                "offsetof(struct {}, {}) == {}",
                $name,
                stringify!($field),
                offset_of!($structure, $field)
            ));)*
        };
    }
    offsets!("aquifer_metadata", Metadata:
        size cache resident dirty remote zero zero_faults remote_faults waiting extents);
    offsets!("aquifer_extent", Extent: from at lease address);
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("facts.c");
    let asserts: String =
        facts.iter().map(|fact| format!("_Static_assert({fact}, \"{fact}\");\n")).collect();
    std::fs::write(&source, format!("#include <aquifer.h>\n{asserts}")).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let mut cc = Command::new("cc");
    let cc =
        cc.args(["-std=c11", "-Wall", "-Werror", "-fsyntax-only", "-I"]).args([&include, &source]);
    let output = cc.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
