//! Signals that stop and resume a child process.

// Each test uses only a part of this module.
#![allow(dead_code, clippy::unwrap_used)]

use std::process::Child;

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

/// Stops the child: its connections stay open and nothing answers.
pub fn freeze(child: &Child) {
    let pid = Pid::from_child(child);
    kill_process(pid, Signal::STOP).unwrap();
    let (_, status) = waitpid(Some(pid), WaitOptions::UNTRACED).unwrap().unwrap();
    assert!(status.stopped());
}

/// Resumes the child after [`freeze`].
pub fn thaw(child: &Child) {
    kill_process(Pid::from_child(child), Signal::CONT).unwrap();
}
