use std::io;
use std::path::PathBuf;

use aquifer_page::{Bytes, HostName, RegionName};
use aquifer_region::RegionError;

/// Why a guest could not be started, asked or stopped.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// A file or a program.
    #[error("{what}: {source}")]
    Io {
        /// What was tried, naming the thing.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// The region that its memory is, or is to be.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// There is one of that name.
    #[error("there is a VM '{0}' already: choose another name, or 'aquifer vm stop {0}' first")]
    Exists(RegionName),
    /// There is none of that name.
    #[error("there is no VM '{0}': 'aquifer vm list' shows those that there are")]
    Unknown(RegionName),
    /// Its QEMU is not there any more.
    #[error("VM '{name}' does not run; its log is {log}", log = .log.display())]
    Ended {
        /// The VM.
        name: RegionName,
        /// What QEMU had to say.
        log: PathBuf,
    },
    /// QEMU did not do what it was asked.
    #[error("QEMU refuses '{command}': {why}")]
    Refused {
        /// What it was asked.
        command: String,
        /// Its words.
        why: String,
    },
    /// QEMU ended before it ran; its words.
    #[error("QEMU does not start: {0}")]
    NotStarted(String),
    /// What the VM's keeper says.
    #[error("{0}")]
    Keeper(String),
    /// The guest goes on running.
    #[error("the guest has not powered itself off within {} s", .0.as_secs())]
    StillRunning(std::time::Duration),
    /// A VM that makes pages dirty faster than they can go over.
    #[error("the VM writes to its memory as fast as that goes over: after {rounds} rounds it would still stand still for longer than {} ms", limit.as_millis())]
    Diverges {
        /// Rounds that were tried.
        rounds: u32,
        /// For how long it may stand still.
        limit: std::time::Duration,
    },
    /// Whoever wanted a VM to move does not any more.
    #[error("the move was cancelled: the VM is here as before")]
    Cancelled,
    /// The processor of the host that a VM is to move to offers less than it has.
    #[error(
        "the processor of the destination ({here}) cannot take a VM that has '-cpu {model}' of the source ({there}): {why}. Start the VM with 'aquifer vm start --cpu MODEL', a model that both hosts offer, to move it between them"
    )]
    UnlikeCpu {
        /// As QEMU calls what the VM has.
        model: String,
        /// Family and model of the destination's processor.
        here: String,
        /// Those of the source's.
        there: String,
        /// What is missing.
        why: String,
    },
    /// A VM is another host's.
    #[error(
        "VM '{name}' is host {to}'s since it was moved: see there; if that host is lost, or does not have it, 'aquifer vm resume {name} --force' has it go on here"
    )]
    Given {
        /// The VM.
        name: RegionName,
        /// Whose it is.
        to: HostName,
    },
    /// A VM is here, and perhaps still another host's.
    #[error(
        "VM '{name}' waits for the word of host {from}, whose it may be still: see there by 'aquifer vm show {name}'; only if it does not run there, and never will, 'aquifer vm resume {name} --force' has it go on here"
    )]
    Awaited {
        /// The VM.
        name: RegionName,
        /// Where it comes from.
        from: HostName,
    },
    /// A VM was given away, and the other host does not say that it has it.
    #[error(
        "VM '{name}' is host {to}'s now, which does not confirm that it has it ({why}): see there by 'aquifer vm show {name}', and have it go on by 'aquifer vm resume {name} --force'"
    )]
    Unconfirmed {
        /// The VM.
        name: RegionName,
        /// Whose it is.
        to: HostName,
        /// What came of asking it.
        why: String,
    },
    /// The memory that a host has set aside for its guests does not suffice.
    #[error(
        "{needs} more is needed, and {free} is free of the memory that is set aside for guests: of {reserved}, they have {used}{}: shrink or stop one, or set more aside by 'aquifer vm budget'",
        if *promised > Bytes::ZERO { format!(", and {promised} is kept for VMs that are out of memory") } else { String::new() }
    )]
    NoRoom {
        /// What is needed.
        needs: Bytes,
        /// What may be given.
        free: Bytes,
        /// What is set aside.
        reserved: Bytes,
        /// What guests have.
        used: Bytes,
        /// What is kept for VMs that may be out of memory.
        promised: Bytes,
    },
    /// What was asked makes no sense.
    #[error("{0}")]
    Misuse(String),
}

impl GuestError {
    /// Turns an I/O error of the step `what` into a [`GuestError::Io`].
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what: what.into(), source }
    }
}
