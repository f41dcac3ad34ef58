//! The errors of this crate.

use std::io;
use std::path::PathBuf;

use aquifer_page::{Bytes, HostName, RegionName};
use aquifer_region::RegionError;

/// An error of an operation on a guest.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// An operation on a file or a process failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation and its object.
        what: String,
        /// The system's error.
        source: io::Error,
    },
    /// The region that is, or becomes, the VM's memory failed.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// A VM of that name exists.
    #[error("there is a VM '{0}' already: choose another name, or 'aquifer vm stop {0}' first")]
    Exists(RegionName),
    /// No VM of that name exists.
    #[error("there is no VM '{0}': 'aquifer vm list' shows those that there are")]
    Unknown(RegionName),
    /// QEMU has exited.
    #[error("VM '{name}' does not run; its log is {log}", log = .log.display())]
    Ended {
        /// The VM.
        name: RegionName,
        /// QEMU's log.
        log: PathBuf,
    },
    /// QEMU answered a command with an error.
    #[error("QEMU refuses '{command}': {why}")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's explanation.
        why: String,
    },
    /// QEMU exited before it answered. The string holds its last messages or its exit status.
    #[error("QEMU does not start: {0}")]
    NotStarted(String),
    /// The VM's supervisor, an engine, QEMU or the other host reports an error.
    #[error("{0}")]
    Keeper(String),
    /// The guest did not power itself off within this time.
    #[error("the guest has not powered itself off within {} s", .0.as_secs())]
    StillRunning(std::time::Duration),
    /// The guest dirties pages faster than pre-copy sends them.
    #[error("the VM writes to its memory as fast as that goes over: after {rounds} rounds it would still stand still for longer than {} ms", limit.as_millis())]
    Diverges {
        /// Rounds that ran.
        rounds: u32,
        /// The downtime limit.
        limit: std::time::Duration,
    },
    /// The operator cancelled the migration, and the VM stays here.
    #[error("the move was cancelled: the VM is here as before")]
    Cancelled,
    /// The destination's processor lacks a feature of the source's.
    #[error(
        "the processor of the destination ({here}) cannot take a VM that has '-cpu {model}' of the source ({there}): {why}. Start the VM with 'aquifer vm start --cpu MODEL', a model that both hosts offer, to move it between them"
    )]
    UnlikeCpu {
        /// QEMU's name of the VM's processor model.
        model: String,
        /// Family and model of the destination's processor.
        here: String,
        /// Family and model of the source's processor.
        there: String,
        /// The missing features, or the differing vendors.
        why: String,
    },
    /// The VM was handed over to another host.
    #[error(
        "VM '{name}' is host {to}'s since it was moved: see there; if that host is lost, or does not have it, 'aquifer vm resume {name} --force' has it go on here"
    )]
    Given {
        /// The VM.
        name: RegionName,
        /// The host that owns the VM.
        to: HostName,
    },
    /// The VM has arrived here, but the source may still own it.
    #[error(
        "VM '{name}' waits for the word of host {from}, whose it may be still: see there by 'aquifer vm show {name}'; only if it does not run there, and never will, 'aquifer vm resume {name} --force' has it go on here"
    )]
    Awaited {
        /// The VM.
        name: RegionName,
        /// The source.
        from: HostName,
    },
    /// The VM was handed over, and the destination has not confirmed that.
    #[error(
        "VM '{name}' is host {to}'s now, which does not confirm that it has it ({why}): see there by 'aquifer vm show {name}', and have it go on by 'aquifer vm resume {name} --force'"
    )]
    Unconfirmed {
        /// The VM.
        name: RegionName,
        /// The destination, which owns the VM.
        to: HostName,
        /// Why the confirmation is missing.
        why: String,
    },
    /// The memory that this host has set aside for guests does not suffice.
    #[error(
        "{needs} more is needed, and {free} is free of the memory that is set aside for guests: of {reserved}, they have {used}{}: shrink or stop one, or set more aside by 'aquifer vm budget'",
        if *promised > Bytes::ZERO { format!(", and {promised} is kept for VMs that are out of memory") } else { String::new() }
    )]
    NoRoom {
        /// Memory that the request needs.
        needs: Bytes,
        /// Memory that this VM may get.
        free: Bytes,
        /// Memory set aside for guests.
        reserved: Bytes,
        /// Memory that guests have.
        used: Bytes,
        /// Memory reserved for VMs that run out of memory.
        promised: Bytes,
    },
    /// The request is invalid. The string says why.
    #[error("{0}")]
    Misuse(String),
}

impl GuestError {
    /// Returns a function that turns an I/O error of the operation `what` into a
    /// [`GuestError::Io`].
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what: what.into(), source }
    }
}
