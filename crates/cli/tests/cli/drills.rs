//! Runs one of the scripts in `drills/`, so that none of what they share falls behind the binary.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::common::stderr;
use crate::region::framework::lacks_regions;

#[test]
fn a_drill_runs_and_loses_what_it_says() {
    if lacks_regions() {
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let built = Path::new(env!("CARGO_BIN_EXE_aquifer")).parent().unwrap();
    let done = Command::new(root.join("drills/run"))
        .args(["--json", "lender_back_empty"])
        .env("AQUIFER_BUILT_DIR", built)
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", stderr(&done));
    let rows: Value = serde_json::from_slice(&done.stdout).unwrap();
    let row = &rows[0];
    assert_eq!(row["drill"], "lender_back_empty");
    assert_eq!((&row["lost"], &row["wrong"]), (&0.into(), &0.into()), "{row}");
    assert!(row["verified"].as_u64().is_some_and(|pages| pages > 0), "{row}");
}

#[test]
fn each_drill_is_in_the_list_that_runs_all() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../drills");
    let listed = Command::new(folder.join("run")).arg("--list").output().unwrap();
    assert!(listed.status.success(), "{}", stderr(&listed));
    let text = String::from_utf8(listed.stdout).unwrap();
    let mut names: Vec<_> = text.lines().filter_map(|line| line.split(' ').next()).collect();
    names.sort_unstable();
    let files = folder.read_dir().unwrap().map(|entry| entry.unwrap().path());
    let scripts = files.filter(|path| path.extension().is_some_and(|suffix| suffix == "py"));
    let stem = |path: std::path::PathBuf| path.file_stem().unwrap().to_str().unwrap().to_owned();
    let mut scripts: Vec<_> = scripts.map(stem).collect();
    scripts.sort_unstable();
    assert_eq!(names, scripts);
}
