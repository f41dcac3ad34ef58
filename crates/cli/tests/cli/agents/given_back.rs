//! Tests of returns that meet an operation under way or a failure.

use std::fs;
use std::process::{Child, Command, Stdio};

use aquifer_api::status::LoanState;
use aquifer_page::Bytes;
use rustix::process::{Pid, Signal, kill_process};

use super::framework::{Answer, Cluster, Host, Spec, lacks_rights, wait_for, wait_until};

#[test]
fn volumes_that_leave_together_make_no_room_for_each_other() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::that_swaps([Spec::new("a").memory(Bytes::mib(48)), Spec::new("b")]);
    let a = &cluster["a"];
    // Each volume has room for all swapped pages.
    let volumes = [a.borrow(Bytes::mib(64)).volume, a.borrow(Bytes::mib(64)).volume];
    assert_ne!(volumes[0], volumes[1]);
    let mut load = a.load(Bytes::mib(80));
    load.filled();
    let refusal = Answer::of(&mut a.aquifer(&["host", "return"]));
    refusal.must_fail(1, &["is swapped out to the 2 volumes", "does not fit into memory"]);
    load.verify();
    assert_eq!(a.status().loans.borrowed.len(), 2);
    load.free();
    a.give_back();
    wait_until("a and b are free", || a.is_free() && cluster["b"].is_free());
}

#[test]
fn memory_that_a_lender_cannot_free_is_not_reported_as_free() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::that_swaps(["a", "b"]);
    let (a, b) = (&cluster["a"], &cluster["b"]);
    a.borrow(Bytes::mib(64));
    let record = b.store().join(format!("{}.json", b.lent().lease));
    fs::remove_file(&record).unwrap();
    // unlink(2) cannot remove a directory.
    fs::create_dir(&record).unwrap();
    a.give_back();
    wait_until("the lender has tried twice to free the memory", || {
        b.log_text().matches("cannot free the memory of a lease").count() > 1
    });
    assert_eq!(b.lent().state, LoanState::Freeing);
    fs::remove_dir(&record).unwrap();
    wait_until("b is free", || b.is_free());
}

fn spawn_piped(command: &mut Command) -> Child {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn signal(host: &Host, pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal)
        .unwrap_or_else(|error| panic!("{}: {error}", host.name()));
}

#[test]
fn a_return_cancels_a_borrowing_and_the_next_one_succeeds() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::that_swaps(["a", "b", "silent"]);
    let (a, silent) = (&cluster["a"], &cluster["silent"]);
    let pid = silent.status().agent.pid;
    // A borrowing waits for the peers' offers.
    signal(silent, pid, Signal::STOP);
    let mut both =
        [(); 2].map(|()| spawn_piped(&mut a.aquifer(&["host", "borrow", "--size", "64M"])));
    let refused = wait_for("one of the two borrowings is refused", || {
        both.iter_mut().position(|borrow| borrow.try_wait().unwrap().is_some())
    });
    let waits = Answer::of(&mut a.aquifer(&["host", "return"]));
    signal(silent, pid, Signal::CONT);
    assert_eq!(waits.code, Some(0), "{waits:?}");
    wait_until("both borrowings have ended", || {
        both.iter_mut().all(|borrow| borrow.try_wait().unwrap().is_some())
    });
    for (index, borrow) in both.into_iter().enumerate() {
        let output = borrow.wait_with_output().unwrap();
        let words =
            if index == refused { "is in progress" } else { "'aquifer host return' cancelled" };
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(words), "{index} of {refused}: {said}");
    }
    a.borrow(Bytes::mib(64));
    a.give_back();
    wait_until("a and b are free", || a.is_free() && cluster["b"].is_free());
}
