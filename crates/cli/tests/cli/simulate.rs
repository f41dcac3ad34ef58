//! Tests of `aquifer simulate`: the same report for the same options, traces, and errors.

use std::fs;

use crate::common::{aquifer, done, stderr, stdout};

#[test]
fn a_simulation_reports_the_same_for_the_same_options() {
    let dir = tempfile::tempdir().unwrap();
    let mut faults = vec!["--loss", "0.1", "--duplication", "0.1", "--crashes", "20"];
    faults.extend(["--cuts", "10", "--drains", "6", "--move-after", "30s"]);
    let run = |seed: &str| {
        let mut command = aquifer(dir.path());
        command.args(["simulate", "--hosts", "5", "--for", "10m", "--memory", "4G", "--seed"]);
        let output = command.arg(seed).args(&faults).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(stderr(&output).starts_with("run time: "), "{}", stderr(&output));
        stdout(&output)
    };
    let text = run("7");
    assert!(text.starts_with("5 hosts of 4GiB for 10m, seed 7: "), "{text}");
    assert!(text.contains(" 0 violations\n"), "{text}");
    assert!(text.contains("\n20 VMs: "), "{text}");
    assert_eq!(text, run("7"));
    assert_ne!(text, run("8"));
}

#[test]
fn a_simulation_replays_a_trace() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("demand.csv");
    fs::write(&trace, "seconds,host,bytes\n0,a,1G\n0,b,1G\n30,a,5G\n").unwrap();
    let path = trace.to_str().unwrap();
    let words = ["simulate", "--trace", path, "--for", "2m", "--memory", "4G"];
    let report = done(dir.path(), &words);
    assert_eq!((&report["hosts"], &report["violations"]), (&2.into(), &0.into()));
    assert_eq!(report["demand"]["most"], 6u64 << 30);
    assert!(report["counts"]["grants"].as_u64() > Some(0), "{report}");
    assert_eq!(report["vms"]["total"], 0, "a trace is all of the demand, unless VMs are asked for");
}

#[test]
fn a_report_tells_of_vms_that_move() {
    let dir = tempfile::tempdir().unwrap();
    let hosts = ["simulate", "--hosts", "6", "--for", "20m", "--memory", "8G", "--vms", "2"];
    let drained = done(dir.path(), &[&hosts[..], &["--drains", "6"]].concat());
    assert_eq!(drained["vms"]["total"], 12);
    assert!(drained["vms"]["drains"].as_u64() > Some(0), "{drained}");
    assert!(drained["vms"]["for_drains"].as_u64() > Some(0), "{drained}");
    let still = done(dir.path(), &[&hosts[..], &["--move-after", "never"]].concat());
    assert_eq!(still["vms"]["for_overload"], 0);
    assert!(still["vms"]["shortest_s"].is_null(), "{still}");
}

#[test]
fn options_that_make_no_simulation_are_explained() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("demand.csv");
    fs::write(&trace, "0,a,much\n").unwrap();
    let path = trace.to_str().unwrap();
    for (words, code, told) in [
        (["--loss", "1.5"], 2, "write a number from 0 to 1"),
        (["--crashes", "-1"], 2, "--crashes"),
        (["--hosts", "0"], 1, "must be above zero"),
        (["--move-after", "soon"], 2, "write a time such as 5m, or never"),
        (["--vms", "40"], 1, "choose fewer --vms, or a smaller --vm-size"),
        (["--trace", path], 1, "line 1: 'much' is not a size"),
        (["--trace", "/nowhere"], 1, "reading the trace /nowhere"),
    ] {
        let output = aquifer(dir.path()).arg("simulate").args(words).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{words:?}");
        assert!(stderr(&output).contains(told), "{words:?}: {}", stderr(&output));
    }
}
