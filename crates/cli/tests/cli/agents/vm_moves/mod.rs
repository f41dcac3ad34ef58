//! Tests of VMs that agents move: from hosts that drain, and from a host that stays overloaded.

mod scene;
mod wire;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use aquifer_api::order::{Draining, VmLeftState};
use aquifer_page::Bytes;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::framework::{Answer, Cluster, wait_until};
pub use scene::lacks_qemu;
use scene::{Scene, spec};

/// Three hosts with the VM `web` on `a`. Of the others, `b` has most room.
fn with_web_on_a() -> Option<Scene> {
    if lacks_qemu() {
        return None;
    }
    let large = spec("b").memory(Bytes::mib(512));
    let mut scene = Scene::new(Cluster::new([spec("a"), large, spec("c")]));
    scene.start("a", "web");
    Some(scene)
}

#[test]
fn a_drain_moves_what_can_move_and_names_what_cannot() {
    if lacks_qemu() {
        return;
    }
    let mut cluster = Cluster::created(spec("a"));
    cluster.join(spec("b"));
    let mut scene = Scene::new(cluster);
    scene.start("a", "web");
    let local = ["vm", "start", "db", "--memory", "32M", "--cache", "none", "--accel", "tcg"];
    assert_eq!(scene.run("a", &local).code, Some(0));

    let drain = scene.run("a", &["host", "drain"]);
    drain.must_fail(1, &["1 VM left", "VM db stays: its memory is no region", "undrain"]);
    assert!(drain.stdout.contains("VM db stays"), "{drain:?}");
    assert_eq!((scene.running("a"), scene.running("b")), (vec!["db".into()], vec!["web".into()]));
    let status = scene.run("a", &["status"]).stdout;
    assert!(status.contains("draining: 1 VM, 0 leases left"), "{status}");
    let why = scene.run("a", &["why", "web"]).stdout;
    assert!(why.contains("this host is draining") && why.contains("moved VM web to b"), "{why}");
    assert!(why.contains("db stays: its memory is no region"), "{why}");

    let all = scene.run("b", &["status", "--cluster"]).stdout;
    assert!(all.lines().any(|line| line.contains(" a ") && line.contains("draining")), "{all}");

    // A host that drains takes no VM.
    let taken = scene.run("b", &["vm", "migrate", "web", "--to", "a"]);
    taken.must_fail(1, &["host a is draining", "aquifer host undrain"]);
    scene.run("b", &["host", "drain", "--timeout", "0s"]).must_fail(1, &["VM web"]);
    scene.waits("b", "no host takes VM 'web', whose cache may take 64MiB: a drains or has no room");
    let stuck = scene.run("b", &["host", "drain", "--timeout", "0s"]);
    stuck.must_fail(1, &["1 VM left: VM web", "the agent keeps draining"]);
    let leave = |scene: &Scene| {
        let mut leave = scene.host("b").aquifer(&["cluster", "leave", "--config"]);
        Answer::of(leave.arg(scene.host("b").config()))
    };
    leave(&scene).must_fail(1, &["VMs with memory at lenders: web", "aquifer host drain"]);

    scene.run("a", &["vm", "stop", "db", "--force"]);
    let done = scene.run("a", &["host", "drain"]);
    assert!(done.code == Some(0) && done.stdout.contains("you can switch it off"), "{done:?}");
    assert!(scene.run("a", &["host", "undrain"]).stdout.contains("lends and takes VMs again"));
    wait_until("b goes on with its drain by itself", || scene.running("a") == ["web"]);
    let done = scene.run("b", &["host", "drain", "--json"]);
    let done: Draining = serde_json::from_str(done.stdout.lines().last().unwrap()).unwrap();
    assert!(done.on && done.vms.is_empty(), "{done:?}");

    // A VM without memory of other hosts needs no cluster.
    assert_eq!(scene.run("b", &["host", "undrain"]).code, Some(0));
    let whole = ["vm", "start", "whole", "--memory", "32M", "--accel", "tcg"];
    assert_eq!(scene.run("b", &whole).code, Some(0));
    let smaller = scene.run("b", &["vm", "migrate", "whole", "--to", "a", "--cache", "16M"]);
    smaller.must_fail(1, &["has 0B at lenders", "aquifer region resize whole --cache 16M"]);
    assert_eq!(leave(&scene).code, Some(0));
    assert_eq!(scene.running("b"), ["whole"]);
    assert_eq!(scene.run("b", &["vm", "stop", "whole", "--force"]).code, Some(0));
}

#[test]
fn a_vm_of_a_group_takes_its_agreement_along() {
    if lacks_qemu() {
        return;
    }
    // These hosts tell each other nothing by gossip.
    let mut scene = Scene::new(Cluster::new([spec("a"), spec("b")]));
    for host in ["a", "b"] {
        assert_eq!(scene.run(host, &["group", "create", "blue"]).code, Some(0));
    }
    scene.start_with("a", "web", &["--group", "blue"]);
    let migrate = ["vm", "migrate", "web", "--to", "b"];
    let refused = scene.run("a", &migrate);
    let words = ["b (key", "a (key", "different groups named 'blue'", "aquifer group rm blue"];
    refused.must_fail(1, &words);
    assert_eq!(scene.running("a"), ["web"]);

    assert_eq!(scene.run("b", &["group", "rm", "blue"]).code, Some(0));
    let moved = scene.run("a", &migrate);
    assert_eq!(moved.code, Some(0), "{moved:?}");
    assert_eq!(scene.running("b"), ["web"]);
    let agreement = |host: &str| fs::read_to_string(scene.host(host).groups().join("blue.toml"));
    assert_eq!(agreement("a").unwrap(), agreement("b").unwrap());
}

#[test]
fn a_target_that_dies_in_a_move_leaves_the_vm_to_the_next() {
    let Some(scene) = with_web_on_a() else { return };
    scene.drain_and_hold("a", "b");
    assert_eq!(scene.running("a"), ["web"]);
    scene.crash("b");
    scene.wire().open();
    let done = scene.run("a", &["host", "drain"]);
    assert_eq!(done.code, Some(0), "{done:?}");
    assert_eq!(scene.running("c"), ["web"]);
    scene.is_left("a");
    let why = scene.run("a", &["why", "web"]).stdout;
    assert!(why.contains("cannot move VM web") && why.contains("moved VM web to c"), "{why}");
    assert!(scene.running("b").is_empty());
}

#[test]
fn an_agent_that_dies_in_a_move_neither_repeats_nor_forgets_it() {
    let Some(scene) = with_web_on_a() else { return };
    scene.drain_and_hold("a", "b");
    scene.host("a").kill_agent();
    // The VM's supervisor cancels the move of the agent that is gone.
    scene.is_left("b");
    assert_eq!(scene.running("a"), ["web"]);
    scene.host("a").restart();
    assert!(scene.draining("a").on, "the next agent goes on");
    scene.wire().open();
    wait_until("the VM is on b", || scene.running("b") == ["web"]);
    assert_eq!(scene.run("a", &["host", "drain"]).code, Some(0));
    scene.is_left("a");
    scene.host("a").signal_agent(Signal::TERM);
    scene.host("a").restart();
    assert!(scene.draining("a").on && scene.running("c").is_empty());
}

#[test]
fn the_end_of_a_drain_in_a_move_keeps_the_vm() {
    let Some(scene) = with_web_on_a() else { return };
    scene.drain_and_hold("a", "b");
    let end = scene.run("a", &["host", "undrain"]);
    assert!(end.stdout.contains("the move of VM web is cancelled"), "{end:?}");
    scene.is_left("b");
    scene.wire().open();
    wait_until("the move has ended", || {
        scene.draining("a").vms.iter().all(|vm| vm.state == VmLeftState::Waits)
    });
    assert_eq!(scene.running("a"), ["web"]);
    // It can move again.
    let moved: Value = scene.run("a", &["vm", "migrate", "web", "--to", "c", "--json"]).json();
    assert_eq!(moved["to"], "c", "{moved}");
    assert_eq!(scene.running("c"), ["web"]);
}

#[test]
fn an_interrupted_drain_says_that_the_agent_goes_on() {
    let Some(scene) = with_web_on_a() else { return };
    scene.drain_and_hold("a", "b");
    let mut drain = scene.host("a").aquifer(&["host", "drain"]);
    let piped = std::process::Stdio::piped;
    let mut drain = drain.stdout(piped()).stderr(piped()).spawn().unwrap();
    wait_until("the command shows the move", || {
        // It handles signals from its first request on.
        let status = fs::read_to_string(format!("/proc/{}/status", drain.id())).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap().trim();
        u64::from_str_radix(caught, 16).unwrap() & (1 << (Signal::INT.as_raw() - 1)) != 0
    });
    kill_process(Pid::from_child(&drain), Signal::INT).unwrap();
    wait_until("the command ends", || drain.try_wait().unwrap().is_some());
    let output = drain.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("interrupted: 1 VM left: VM web moves to b"), "{told}");
    assert!(told.contains("the agent keeps draining"), "{told}");
    scene.wire().open();
    wait_until("the VM is on b", || scene.running("b") == ["web"]);
}

#[test]
fn a_host_with_a_lesser_processor_refuses_and_the_next_takes_it() {
    if lacks_qemu() {
        return;
    }
    let large = spec("b").memory(Bytes::mib(512));
    let cluster = Cluster::admitted([spec("a"), large, spec("c")]);
    let qemu = cluster.dir().join("qemu");
    let lesser = "#!/bin/sh\nexec qemu-system-x86_64 -global max-x86_64-cpu.avx2=off \"$@\"\n";
    fs::write(&qemu, lesser).unwrap();
    fs::set_permissions(&qemu, fs::Permissions::from_mode(0o700)).unwrap();
    cluster["b"].configure(|config| {
        let vms = config["vms"].as_table_mut().unwrap();
        vms.insert("qemu".to_owned(), qemu.to_str().unwrap().into());
    });
    for host in ["a", "b", "c"] {
        cluster[host].restart();
    }
    let mut scene = Scene::new(cluster);
    scene.start("a", "web");
    let refused = scene.run("a", &["vm", "migrate", "web", "--to", "b"]);
    refused.must_fail(1, &["it lacks avx2", "--cpu MODEL"]);
    scene.is_left("b");
    let done = scene.run("a", &["host", "drain"]);
    assert_eq!(done.code, Some(0), "{done:?}");
    assert_eq!(scene.running("c"), ["web"]);
    let why = scene.run("a", &["why", "web"]).stdout;
    assert!(why.contains("moved VM web to c") && why.contains("The others: b: "), "{why}");
    assert!(why.contains("it lacks avx2"), "{why}");
    let why = scene.run("b", &["why", "web"]).stdout;
    assert!(why.contains("does not take VM web of a: ") && why.contains("it lacks avx2"), "{why}");
    let why = scene.run("c", &["why", "a"]).stdout;
    assert!(why.contains("takes VM web from a"), "{why}");
}

#[test]
fn a_vm_leaves_a_host_that_stays_overloaded() {
    if lacks_qemu() {
        return;
    }
    let a = spec("a").memory(Bytes::mib(512)).set("vms", "move_after", "1s");
    let mut scene = Scene::new(Cluster::new([a, spec("b").memory(Bytes::mib(512))]));
    scene.start("a", "web");
    let memory = scene.host("a").status().memory;
    assert!(memory.used < memory.upper, "{memory:?}");
    let missing = memory.upper - memory.used + Bytes::mib(24);
    let mut load = scene.host("a").load(missing);
    load.filled();
    wait_until("the VM is on b", || scene.running("b") == ["web"]);
    scene.is_left("a");
    load.verify();
    let why = scene.run("a", &["why", "web"]).stdout;
    assert!(why.contains("overloaded for") && why.contains("moved VM web to b"), "{why}");
}

#[test]
fn two_hosts_that_drain_at_once_share_the_room_of_a_third() {
    if lacks_qemu() {
        return;
    }
    // Below T_upper, c has room for one cache.
    let small = spec("c").memory(Bytes::mib(144));
    let mut scene = Scene::new(Cluster::new([spec("a"), spec("b"), small]));
    scene.start("a", "web");
    scene.start("b", "db");
    scene.host("c").count_agent();
    for host in ["a", "b"] {
        scene.run(host, &["host", "drain", "--timeout", "0s"]).must_fail(1, &["VM"]);
    }
    wait_until("c has one of them", || scene.running("c").len() == 1);
    let (moved, host, vm) = match &scene.running("c")[0][..] {
        "web" => ("web", "b", "db"),
        _ => ("db", "a", "web"),
    };
    scene.waits(host, "c can spare");
    assert_eq!(scene.running(host), [vm], "it stays, and waits");
    let why = scene.run(host, &["why", vm]).stdout;
    assert!(why.contains(&format!("cannot move VM {vm}, tries again")), "{why}");
    // The agent keeps trying.
    scene.run("c", &["vm", "stop", "--force", moved]);
    wait_until("c has the other one", || scene.running("c") == [vm]);
    for host in ["a", "b"] {
        assert_eq!(scene.run(host, &["host", "drain"]).code, Some(0));
    }
}

#[test]
fn an_operator_cannot_move_a_vm_to_a_host_without_room() {
    if lacks_qemu() {
        return;
    }
    let mut scene = Scene::new(Cluster::new([spec("a"), spec("b").memory(Bytes::mib(80))]));
    scene.start("a", "web");
    scene.start("a", "db");
    scene.host("b").count_agent();
    let moved: Value = scene.run("a", &["vm", "migrate", "web", "--to", "b", "--json"]).json();
    assert_eq!(moved["to"], "b", "{moved}");
    let refused = scene.run("a", &["vm", "migrate", "db", "--to", "b"]);
    refused.must_fail(1, &["it takes 64MiB of this host's RAM", "a smaller cache with --cache"]);
    scene
        .run("a", &["vm", "migrate", "db"])
        .must_fail(1, &["no host takes VM 'db'", "b drains or has no room"]);
    assert_eq!(scene.running("a"), ["db"]);
    let why = scene.run("b", &["why", "db"]).stdout;
    assert!(why.contains("refuses VM db of a: it takes 64MiB"), "{why}");
    let why = scene.run("b", &["why", "web"]).stdout;
    assert!(why.contains("takes VM web from a: its cache may take 64MiB"), "{why}");
}
