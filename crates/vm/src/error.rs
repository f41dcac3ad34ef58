//! The errors of this crate.

use std::io;
use std::path::PathBuf;

use aquifer_page::{Bytes, HostName, RegionName};
use aquifer_region::RegionError;

use crate::definition::DefinitionError;

/// An error of an operation on a guest.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
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
    /// The VM's definition cannot be read or written.
    #[error(transparent)]
    Definition(#[from] DefinitionError),
    /// A VM of that name exists.
    #[error("a VM '{0}' exists already: choose another name, or run 'aquifer vm stop {0}' first")]
    Exists(RegionName),
    /// No VM of that name exists.
    #[error("there is no VM '{0}': 'aquifer vm list' lists the VMs of this host")]
    Unknown(RegionName),
    /// No supervisor read the request.
    #[error("VM '{name}' has no supervisor ({source}): 'aquifer vm resume {name}' starts one")]
    Unsupervised {
        /// The VM.
        name: RegionName,
        /// The system's error.
        source: io::Error,
    },
    /// QEMU has exited.
    #[error("VM '{name}' is not running; its log is {log}", log = .log.display())]
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
    #[error("QEMU did not start: {0}")]
    NotStarted(String),
    /// The VM's supervisor, an engine, QEMU or the other host reports an error.
    #[error("{0}")]
    Reported(String),
    /// The guest did not power itself off within this time.
    #[error("the guest did not power itself off within {} s", .0.as_secs())]
    StillRunning(std::time::Duration),
    /// The guest dirties pages faster than pre-copy sends them.
    #[error(
        "the VM dirties its memory as fast as the migration sends it: after {rounds} rounds, the \
         downtime would still exceed {} ms. Allow more with --max-downtime, or allow post-copy",
        limit.as_millis()
    )]
    Diverges {
        /// Rounds that ran.
        rounds: u32,
        /// The downtime limit.
        limit: std::time::Duration,
    },
    /// The operator cancelled the migration, and the VM stays here.
    #[error("the migration was cancelled: the VM stays on this host")]
    Cancelled,
    /// The destination's processor lacks a feature of the source's.
    #[error(
        "the destination's processor ({here}) cannot run this VM, which has '-cpu {model}' of the \
         source's processor ({there}): {why}. To migrate between these hosts, start the VM with \
         'aquifer vm start --cpu MODEL' and a model that both hosts offer"
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
        "VM '{name}' moved to host {to} and belongs to it. If that host is lost or has no such VM, \
         resume it here with 'aquifer vm resume {name} --force'"
    )]
    HandedOver {
        /// The VM.
        name: RegionName,
        /// The host that owns the VM.
        to: HostName,
    },
    /// The VM has arrived here, but the source may still own it.
    #[error(
        "VM '{name}' waits for host {from}, which may still own it, to confirm the hand-over. \
         Run 'aquifer vm show {name}' there; only if the VM does not run there and never will, \
         resume it here with 'aquifer vm resume {name} --force'"
    )]
    Incoming {
        /// The VM.
        name: RegionName,
        /// The source.
        from: HostName,
    },
    /// The VM was handed over, and the destination has not confirmed that.
    #[error(
        "host {to} owns VM '{name}' now, but does not confirm the hand-over ({why}). \
         Run 'aquifer vm show {name}' there, and resume the VM there with \
         'aquifer vm resume {name} --force'"
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
        "the VM needs {needs} more, but only {free} of the memory set aside for guests is free: \
         guests use {used} of {reserved}{}. Shrink or stop a VM, or set more aside with \
         'aquifer vm set-budget'",
        promised_part(*promised)
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

/// Returns the part of the message of [`VmError::NoRoom`] about reserved memory.
fn promised_part(promised: Bytes) -> String {
    if promised == Bytes::ZERO {
        return String::new();
    }
    format!(", and {promised} is reserved for VMs that run out of memory")
}

impl VmError {
    /// Returns a function that turns an I/O error of the operation `what` into a
    /// [`VmError::Io`].
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what: what.into(), source }
    }
}
