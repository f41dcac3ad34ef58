//! Tests of a group's state with silent VMs.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::os::unix::net::UnixListener;

use aquifer_control_socket::ControlCall;
use aquifer_vm::{Backing, VmSpec};
use serde_json::json;

use super::*;

/// Creates a VM with limits from 256 MiB to all of its 512 MiB. The supervisor's backlog is full,
/// as if the process were stopped.
fn silent(run_dir: &Path) -> (Files, UnixListener, Vec<ControlCall>) {
    let files = Files::new(run_dir, &"one".parse().unwrap());
    let directory = run_dir.join("vms/one");
    fs::create_dir_all(&directory).unwrap();
    let spec = VmSpec::new(files.name().clone(), Bytes::mib(512), Backing::Region);
    let record = json!({ "origin": { "started": spec }, "pid": 1, "ended": null });
    fs::write(directory.join("record.json"), record.to_string()).unwrap();
    let limits = json!({ "min": Bytes::mib(256), "max": u64::MAX, "weight": 1, "reserve": 0 });
    fs::write(directory.join("limits.json"), limits.to_string()).unwrap();
    let keeper = directory.join("keeper");
    let listener = UnixListener::bind(&keeper).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let short = Duration::from_millis(50);
    let queued = std::iter::from_fn(|| ControlCall::connect(&keeper, "fill", short).ok()).collect();
    (files, listener, queued)
}

#[test]
fn a_silent_vm_counts_as_it_was_seen_and_is_asked_now_and_then() {
    let dir = tempfile::tempdir().unwrap();
    let (vm, _listener, _queued) = silent(dir.path());
    let is = Vm {
        vm: vm.name().clone(),
        base: Bytes::mib(256),
        max: Bytes::mib(512),
        size: Bytes::mib(300),
        target: Bytes::mib(310),
        swapped: Bytes::mib(1),
        contributed: Bytes::ZERO,
    };
    let before =
        Known { is: is.clone(), told: Some(is.target), swapped: Some(7), silent_until: None };
    let now = Instant::now();
    let (known, news) = find(&vm, Some(before), Bytes::mib(2), now);
    let known = known.unwrap();
    assert_eq!(known.is, Vm { swapped: Bytes::ZERO, contributed: Bytes::mib(2), ..is });
    assert!(news.unwrap().contains("no answer to 'balloon' within"));
    // The VM is not queried again at once, and the news is not repeated.
    let until = known.silent_until.unwrap();
    let (again, news) = find(&vm, Some(known), Bytes::mib(2), now);
    assert_eq!((again.unwrap().silent_until, news), (Some(until), None));
}

#[test]
fn a_vm_that_was_never_heard_may_hold_all_that_it_can() {
    let dir = tempfile::tempdir().unwrap();
    let (vm, _listener, _queued) = silent(dir.path());
    let (known, _) = find(&vm, None, Bytes::ZERO, Instant::now());
    assert_eq!(handed([&known.unwrap().is]), Bytes::mib(256));
    fs::remove_dir_all(dir.path().join("vms/one")).unwrap();
    assert!(find(&vm, None, Bytes::ZERO, Instant::now()).0.is_none(), "it is gone");
}
