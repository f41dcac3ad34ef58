//! Tests of cgroups: with the kernel's own as root, and with a directory that imitates version 2.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

/// Returns a name that no other test and no other run uses at the same time.
fn name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("aquifer-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Returns the kernel's hierarchy; `None` without root or memory cgroups, where the tests cannot
/// run.
fn real() -> Option<Hierarchy> {
    let hierarchy = Hierarchy::find().ok().filter(|_| rustix::process::geteuid().is_root());
    if hierarchy.is_none() {
        eprintln!("skipped: needs root and memory cgroups");
    }
    hierarchy
}

const SMALL: Limits = Limits { memory: Bytes::mib(32), swap: Swap::Forbidden };

#[test]
fn a_command_starts_inside_and_is_charged_there() {
    let Some(hierarchy) = real() else { return };
    hierarchy.enable().unwrap();
    let cgroup = Cgroup::create(&hierarchy, &name(), SMALL).unwrap();
    let mut command = Command::new("sleep");
    crate::sys::start_in_cgroup(command.arg("600"), cgroup.entrance().unwrap());
    let mut child = command.spawn().unwrap();

    let pid = Pid::from_child(&child);
    assert_eq!(cgroup.processes().unwrap(), [pid]);
    assert!(cgroup.memory_used().unwrap() > Bytes::ZERO);
    assert_eq!(cgroup.swap_used().unwrap(), Bytes::ZERO);

    let path = cgroup.path().to_owned();
    let reaper = thread::spawn(move || child.wait().unwrap());
    cgroup.remove().unwrap();
    assert!(!path.exists());
    assert!(!reaper.join().unwrap().success());
}

#[test]
fn a_process_beyond_its_limit_without_swap_is_killed() {
    let Some(hierarchy) = real() else { return };
    hierarchy.enable().unwrap();
    let cgroup = Cgroup::create(&hierarchy, &name(), SMALL).unwrap();
    // tail keeps its last line, and the only line of /dev/zero never ends.
    let mut command = Command::new("sh");
    crate::sys::start_in_cgroup(command.args(["-c", "tail /dev/zero"]), cgroup.entrance().unwrap());
    assert!(!command.status().unwrap().success());
    assert_eq!(cgroup.oom_kills().unwrap(), 1);
}

#[test]
fn a_dropped_cgroup_is_gone_and_so_is_what_ran_in_it() {
    let Some(hierarchy) = real() else { return };
    hierarchy.enable().unwrap();
    let cgroup = Cgroup::create(&hierarchy, &name(), SMALL).unwrap();
    let path = cgroup.path().to_owned();
    let mut child = Command::new("sleep").arg("600").spawn().unwrap();
    cgroup.add(child.id()).unwrap();
    let reaper = thread::spawn(move || child.wait().unwrap());
    drop(cgroup);
    assert!(!path.exists());
    assert!(!reaper.join().unwrap().success());
}

#[test]
fn version_2_gets_its_limits_by_its_own_names() {
    let root = tempfile::tempdir().unwrap();
    let hierarchy = Hierarchy::at(root.path(), Version::V2);
    let dir = root.path().join("x");
    for (swap, text) in
        [(Swap::Unlimited, "max"), (Swap::AtMost(Bytes::mib(1)), "1048576"), (Swap::Forbidden, "0")]
    {
        fs::create_dir(&dir).unwrap();
        for file in ["memory.max", "memory.swap.max"] {
            fs::write(dir.join(file), "").unwrap();
        }
        let mut cgroup = Cgroup::adopt(&hierarchy, "x").unwrap();
        cgroup.removed = true; // In a plain directory rmdir would fail on the files.
        cgroup.limit(Limits { memory: Bytes::mib(2), swap }).unwrap();
        assert_eq!(fs::read_to_string(dir.join("memory.max")).unwrap(), "2097152");
        assert_eq!(fs::read_to_string(dir.join("memory.swap.max")).unwrap(), text);
        fs::remove_dir_all(&dir).unwrap();
    }
}

#[test]
fn version_2_usage_is_read_by_its_own_names() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("x");
    fs::create_dir(&dir).unwrap();
    for (file, text) in [
        ("memory.current", "8192\n"),
        ("memory.swap.current", "4096\n"),
        ("memory.events", "low 0\noom 1\noom_kill 3\noom_group_kill 9\n"),
    ] {
        fs::write(dir.join(file), text).unwrap();
    }
    let mut cgroup = Cgroup::adopt(&Hierarchy::at(root.path(), Version::V2), "x").unwrap();
    cgroup.removed = true;
    assert_eq!(cgroup.memory_used().unwrap(), Bytes(8192));
    assert_eq!(cgroup.swap_used().unwrap(), Bytes(4096));
    assert_eq!(cgroup.oom_kills().unwrap(), 3);
}

#[test]
fn a_kernel_that_does_not_count_swap_is_named_as_the_reason() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("x");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("memory.max"), "").unwrap();
    let mut cgroup = Cgroup::adopt(&Hierarchy::at(root.path(), Version::V2), "x").unwrap();
    cgroup.removed = true;
    let error = cgroup.limit(SMALL).unwrap_err().to_string();
    assert!(error.contains("swapaccount=1"), "{error}");
}
