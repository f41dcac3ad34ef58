//! A test that the rules of the swap path hold in a process that has applied them.

use std::fs;
use std::process::{Command, Stdio};

use aquifer_blockdev::safety;
use rustix::thread::{CapabilitySet, capabilities};

use crate::common::cgroup::Cgroup;

const GROUP_VARIABLE: &str = "AQUIFER_TEST_SAFETY_GROUP";

/// Not a test: the process that applies the rules inside a cgroup and checks that they hold.
#[test]
fn the_protected_process() {
    let Some(procs) = std::env::var_os(GROUP_VARIABLE) else { return };
    fs::write(procs, "0").unwrap();
    let report = safety::protect();
    // Some containers withhold capabilities from root. The report must then name the rules that
    // need them, and no others.
    let effective = capabilities(None).unwrap().effective;
    let failed: Vec<_> = report.0.iter().filter_map(|rule| rule.failed.as_ref()).collect();
    let lacking = |name: &str| failed.iter().filter(|why| why.contains(name)).count();
    if effective.contains(CapabilitySet::SYS_RESOURCE) {
        assert_eq!(fs::read_to_string("/proc/self/oom_score_adj").unwrap().trim(), "-1000");
        assert!(rustix::process::is_io_flusher().unwrap());
        std::thread::spawn(|| assert!(rustix::process::is_io_flusher().unwrap())).join().unwrap();
    } else {
        assert_eq!(lacking("CAP_SYS_RESOURCE"), 2, "{report:?}");
    }
    if effective.contains(CapabilitySet::SYS_NICE) {
        assert_eq!(policy_of_a_new_thread(), SCHED_RR);
    } else {
        assert_eq!(lacking("CAP_SYS_NICE"), 1, "{report:?}");
    }
    assert_eq!(lacking("CAP_SYS_RESOURCE") + lacking("CAP_SYS_NICE"), failed.len(), "{report:?}");
    assert!(!fs::read_to_string("/proc/self/cgroup").unwrap().contains("aquifer-test-safety"));

    let text_and_heap = locked_kib();
    assert!(text_and_heap > 4096, "only {text_and_heap} KiB are locked");
    let untouched: Vec<u8> = Vec::with_capacity(64 << 20);
    let resident = status_kib("VmRSS:");
    assert!(
        resident < 64 << 10,
        "{resident} KiB are resident: a buffer came in before it was touched"
    );
    drop(untouched);
}

const SCHED_RR: u64 = 2;

/// Returns the scheduling policy of a new thread: field 41 of its `stat`. Field 2 is a name in
/// parentheses (proc_pid_stat(5)).
fn policy_of_a_new_thread() -> u64 {
    let stat = std::thread::spawn(|| fs::read_to_string("/proc/thread-self/stat").unwrap())
        .join()
        .unwrap();
    let (_, after_name) = stat.rsplit_once(')').unwrap();
    after_name.split_ascii_whitespace().nth(38).unwrap().parse().unwrap()
}

fn status_kib(field: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_ascii_whitespace().nth(1).unwrap().parse().unwrap()
}

fn locked_kib() -> u64 {
    status_kib("VmLck:")
}

#[test]
fn a_process_in_a_cgroup_leaves_it_and_gets_every_protection() {
    let group = Cgroup::new("aquifer-test-safety", 256 << 20);
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "safety::the_protected_process"])
        .env(GROUP_VARIABLE, group.procs())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
