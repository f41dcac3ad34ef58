//! A child that stands still.

// Each test program uses the part of it that it needs.
#![allow(dead_code, clippy::unwrap_used)]

use std::process::Child;

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

/// Stops it where it is: connections stay and nothing answers.
pub fn freeze(child: &Child) {
    let pid = Pid::from_child(child);
    kill_process(pid, Signal::STOP).unwrap();
    let (_, status) = waitpid(Some(pid), WaitOptions::UNTRACED).unwrap().unwrap();
    assert!(status.stopped());
}

/// Lets it go on after [`freeze`].
pub fn thaw(child: &Child) {
    kill_process(Pid::from_child(child), Signal::CONT).unwrap();
}
