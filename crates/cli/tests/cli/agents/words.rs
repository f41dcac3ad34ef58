//! Tests of the messages for an operator during a wait, or for an ignored request.

use std::fs;

use aquifer_api::status::LeaseHealth;
use aquifer_page::Bytes;
use rustix::process::{Pid, Signal, kill_process};

use super::framework::{Answer, Cluster, Spec, lacks_rights, wait_until};

#[test]
fn a_return_says_at_once_which_lender_it_waits_for() {
    if lacks_rights() {
        return;
    }
    let a = Spec::new("a").memory(Bytes::mib(32)).set("borrow", "io_timeout", "2s");
    let cluster = Cluster::that_swaps([a, Spec::new("b").memory(Bytes::mib(96))]);
    let (a, b) = (&cluster["a"], &cluster["b"]);
    a.borrow(Bytes::mib(64));
    let mut load = a.load(Bytes::mib(48));
    load.filled();
    load.order("rewrite");
    b.kill_agent();
    wait_until("a reports b as unreachable", || {
        a.held_of("b").is_some_and(|held| held.health == LeaseHealth::Unreachable)
    });
    let answer = Answer::of(&mut a.aquifer(&["host", "return"]));
    assert!(answer.stderr.contains("waiting for lender b, unreachable for"), "{answer:?}");
    b.restart();
}

#[test]
fn an_agent_ignores_sighup_and_names_the_alternative() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::new(["a"]);
    let a = &cluster["a"];
    let pid = a.status().agent.pid;
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), Signal::HUP).unwrap();
    let log = a.config().with_file_name("agent.log");
    wait_until("the log says that SIGHUP is ignored", || {
        fs::read_to_string(&log).unwrap().contains("SIGHUP is ignored")
    });
    assert_eq!(a.status().agent.pid, pid);
}
