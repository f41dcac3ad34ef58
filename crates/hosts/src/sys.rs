//! The unsafe code of this crate, and nothing else.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use rustix::thread::LinkNameSpaceType;

/// Makes `command` start inside a network namespace; its other namespaces stay this process's.
pub(crate) fn start_in_network(command: &mut Command, namespace: OwnedFd) {
    // SAFETY: between fork and exec the closure only calls setns(2) on an open descriptor. That is
    // async-signal-safe; the closure neither allocates nor takes locks.
    unsafe {
        command.pre_exec(move || {
            rustix::thread::move_into_link_name_space(
                namespace.as_fd(),
                Some(LinkNameSpaceType::Network),
            )
            .map_err(io::Error::from)
        });
    }
}
