//! A volume's state, for people and programs.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use aquifer_fabric::Address;
use aquifer_page::{Bytes, HostName, LeaseId, VolumeId};
use serde::{Deserialize, Serialize};

use crate::events::{Event, now_ms};
use crate::lease::Lease;
use crate::lock;
use crate::seal::Sealing;

/// The state of a volume at some moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeStatus {
    /// The volume.
    pub id: VolumeId,
    /// Its size.
    pub capacity: Bytes,
    /// Extents that have a place.
    pub placed_extents: u64,
    /// Pages that were written and not discarded since.
    pub written: Bytes,
    /// What went through it.
    pub traffic: Traffic,
    /// Its leases.
    pub leases: Vec<LeaseStatus>,
    /// Its spill file, if it has one.
    pub spill: Option<SpillStatus>,
    /// Operations that failed.
    pub errors: u64,
    /// Reads that failed: the program that needed a page got a bus error, unless the kernel only read ahead.
    #[serde(default)]
    pub failed_reads: u64,
    /// Why the last one did. Nothing once the lender it was of answers again, or there is room again.
    pub last_error: Option<String>,
    /// When that was, in milliseconds since the epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error_at_ms: Option<u64>,
    /// What happened lately that an operator has to know, the oldest first.
    #[serde(default)]
    pub events: Vec<Event>,
}

/// Bytes that went through a volume since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Read.
    pub read: Bytes,
    /// Written.
    pub written: Bytes,
    /// Discarded, or zeroed.
    pub discarded: Bytes,
}

/// The state of one lease of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseStatus {
    /// The lease.
    pub lease: LeaseId,
    /// Whose it is.
    pub lender: HostName,
    /// Where its pages are.
    pub address: Address,
    /// What it can hold.
    pub extents: u64,
    /// What it holds.
    pub used_extents: u64,
    /// How its pages are sealed, if they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sealed: Option<Sealing>,
    /// How it is.
    #[serde(flatten)]
    pub state: LeaseState,
}

/// How a lease is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum LeaseState {
    /// In use.
    Ok,
    /// In use, but the lender said that it has no room for more.
    Full,
    /// The lender cannot be reached.
    Unreachable {
        /// For how long.
        for_ms: u64,
    },
    /// The lender has forgotten what it held, or gives it to another owner: pages that are there cannot be read.
    Lost,
    /// Its extents are moving elsewhere.
    Evacuating {
        /// Extents that have.
        moved: u64,
        /// Extents that had to, when it began.
        total: u64,
    },
}

impl fmt::Display for LeaseState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ok => f.write_str("ok"),
            Self::Full => f.write_str("its lender is full"),
            Self::Lost => {
                f.write_str("lost: its lender does not have what was stored there any more")
            }
            Self::Unreachable { for_ms: ms @ ..10_000 } => {
                write!(f, "unreachable for {:.1} s", *ms as f64 / 1000.0)
            }
            Self::Unreachable { for_ms } => write!(f, "unreachable for {} s", for_ms / 1000),
            Self::Evacuating { moved, total } => {
                write!(f, "moving, {moved} of {total} extents done")
            }
        }
    }
}

/// The state of a spill file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpillStatus {
    /// What it holds.
    pub used_extents: u64,
    /// The pages in it that hold something.
    #[serde(default)]
    pub held: Bytes,
}

/// The state of a lease as far as is known; nothing for the spill file.
pub(crate) fn lease_status(lease: &Lease) -> Option<LeaseStatus> {
    let target = lease.target.as_ref()?;
    let (total, moved) = &lease.leaving;
    let state = if lease.is_lost() {
        LeaseState::Lost
    } else if !lease.is_open() {
        LeaseState::Evacuating {
            moved: moved.load(Ordering::Relaxed),
            total: total.load(Ordering::Relaxed),
        }
    } else if let Some(away) = lease.holder.unreachable_for() {
        LeaseState::Unreachable { for_ms: away.as_millis() as u64 }
    } else if lease.full.load(Ordering::Relaxed) {
        LeaseState::Full
    } else {
        LeaseState::Ok
    };
    Some(LeaseStatus {
        lease: target.lease,
        lender: target.lender.clone(),
        address: target.address.clone(),
        extents: lease.total,
        used_extents: lease.taken(),
        sealed: target.seal.as_ref().map(|seal| seal.sealing),
        state,
    })
}

/// What a volume counts.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    read: AtomicU64,
    written: AtomicU64,
    discarded: AtomicU64,
    errors: AtomicU64,
    failed_reads: AtomicU64,
    /// Extents were placed in the spill file, and it has not been found empty since.
    pub(crate) spills: AtomicBool,
    had_no_room: AtomicBool,
    last_error: Mutex<Option<LastError>>,
}

/// What failed last.
#[derive(Clone, Debug)]
pub(crate) struct LastError {
    pub(crate) text: String,
    /// Milliseconds since the epoch.
    pub(crate) at_ms: u64,
    /// Of which lease it was; that there was no room is of none.
    lease: Option<LeaseId>,
}

impl Counters {
    pub(crate) fn read(&self, bytes: usize) {
        self.read.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn written(&self, bytes: usize) {
        self.written.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn discarded(&self, bytes: u64) {
        self.discarded.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn failed(&self, text: String, lease: Option<LeaseId>) {
        self.errors.fetch_add(1, Ordering::Relaxed);
        self.had_no_room.fetch_or(lease.is_none(), Ordering::Relaxed);
        *lock(&self.last_error) = Some(LastError { text, at_ms: now_ms(), lease });
    }

    pub(crate) fn failed_read(&self) {
        self.failed_reads.fetch_add(1, Ordering::Relaxed);
    }

    /// The lease answers again: an error of it is of the past.
    pub(crate) fn recovered(&self, lease: LeaseId) {
        lock(&self.last_error).take_if(|error| error.lease == Some(lease));
    }

    /// There is room: that there was none is of the past.
    pub(crate) fn found_room(&self) {
        if self.had_no_room.swap(false, Ordering::Relaxed) {
            lock(&self.last_error).take_if(|error| error.lease.is_none());
        }
    }

    pub(crate) fn traffic(&self) -> Traffic {
        let bytes = |counter: &AtomicU64| Bytes(counter.load(Ordering::Relaxed));
        Traffic {
            read: bytes(&self.read),
            written: bytes(&self.written),
            discarded: bytes(&self.discarded),
        }
    }

    /// How many operations failed, how many of them were reads, and the last.
    pub(crate) fn errors(&self) -> (u64, u64, Option<LastError>) {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (count(&self.errors), count(&self.failed_reads), lock(&self.last_error).clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_a_lease_is_reads_as_words() {
        for (state, words) in [
            (LeaseState::Unreachable { for_ms: 1_540 }, "unreachable for 1.5 s"),
            (LeaseState::Unreachable { for_ms: 21_477 }, "unreachable for 21 s"),
            (LeaseState::Evacuating { moved: 3, total: 12 }, "moving, 3 of 12 extents done"),
        ] {
            assert_eq!(state.to_string(), words);
        }
    }
}
