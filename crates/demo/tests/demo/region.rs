//! Tests of `aquifer demo region`.

use std::fs;

use serde_json::Value;

use crate::{aquifer, stderr};

#[test]
fn the_demo_finds_every_value_and_leaves_nothing() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let picture = dir.path().join("region.png");
    let words = ["--json", "demo", "region", "--cache", "32M", "--picture"];
    let output = aquifer(dir.path()).args(words).arg(&picture).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    let number = |of: &str| summary[of].as_f64().unwrap();
    assert!(number("values_written") > 50_000.0 && number("values_wrong") == 0.0, "{summary}");
    assert_eq!(number("values_verified"), number("values_written"));
    assert_eq!(
        (number("local_bytes"), number("region_bytes")),
        (f64::from(32 << 20), f64::from(128 << 20))
    );
    assert!(number("faults") > 10_000.0 && number("fault_p50_us") > 0.0, "{summary}");
    assert!(fs::read(&picture).unwrap().starts_with(b"\x89PNG"));
    fs::remove_file(&picture).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}
