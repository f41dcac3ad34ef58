//! The state of a volume, for people and programs.

use std::fmt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use aquifer_page::{Bytes, EXTENT_SIZE, HostName, LeaseId, VolumeId};
use aquifer_transport::Address;
use serde::{Deserialize, Serialize};

use crate::disk_copies::reason;
use crate::encryption::EncryptionMode;
use crate::events::{Event, now_ms};
use crate::holder::{Holder as _, LaggingHolder};
use crate::lease::Lease;
use crate::lock;

/// The state of a volume at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeStatus {
    /// The volume.
    pub id: VolumeId,
    /// The volume's size.
    pub capacity: Bytes,
    /// The number of extents that have a place.
    pub placed_extents: u64,
    /// The pages written and not discarded since, in bytes.
    pub written: Bytes,
    /// The bytes that went through the volume.
    pub traffic: Traffic,
    /// The volume's leases.
    pub leases: Vec<LeaseStatus>,
    /// The volume's spill file, if it has one.
    pub spill: Option<SpillStatus>,
    /// The number of failed operations.
    pub errors: u64,
    /// The number of failed reads. The program that needed the page got SIGBUS, unless the kernel
    /// only read ahead.
    #[serde(default)]
    pub failed_reads: u64,
    /// The last error. `None` once its lender answers again, or there is room again.
    pub last_error: Option<String>,
    /// The time of the last error, in milliseconds since the Unix epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error_at_ms: Option<u64>,
    /// The latest events that an operator must know, oldest first.
    #[serde(default)]
    pub events: Vec<Event>,
}

/// The bytes that went through a volume since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Bytes read.
    pub read: Bytes,
    /// Bytes written.
    pub written: Bytes,
    /// Bytes discarded or zeroed.
    pub discarded: Bytes,
}

/// The state of one lease of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseStatus {
    /// The lease.
    pub lease: LeaseId,
    /// The lease's lender.
    pub lender: HostName,
    /// The address of the lender's server.
    pub address: Address,
    /// The number of extents that the lease can hold.
    pub extents: u64,
    /// The number of extents that the lease holds.
    pub used_extents: u64,
    /// The encryption mode of its pages; `None` if they are not encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<EncryptionMode>,
    /// The second copy of its pages, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<CopyStatus>,
    /// The copy of its pages on this host's disk, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskCopyStatus>,
    /// The state of the lease.
    #[serde(flatten)]
    pub state: LeaseState,
}

/// The state of the second copy of a lease's pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyStatus {
    /// The lease that holds the copy.
    pub lease: LeaseId,
    /// The lease's lender.
    pub lender: HostName,
    /// The address of the lender's server.
    pub address: Address,
    /// Whether each of the two lenders answers, and has what it stored: the first, and this one.
    pub answer: (bool, bool),
    /// The pages that only the first copy has, in bytes. They would be lost with its lender.
    pub lacks: Bytes,
    /// The pages that only this copy has, in bytes.
    pub first_lacks: Bytes,
    /// The reads that went to both lenders, since one was late.
    #[serde(default)]
    pub late_reads: u64,
    /// The ring of a copy that lags behind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ring: Option<RingStatus>,
}

/// The state of the ring of a copy that lags behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingStatus {
    /// The locked memory of this host that it takes.
    pub size: Bytes,
    /// The pages in it, in bytes, which have yet to reach the lender of the copy. They would be
    /// lost with the lender of the first copy if the process ended now.
    pub used: Bytes,
}

/// The state of the copy of a lease's pages on this host's disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskCopyStatus {
    /// The id of the copy's tags.
    pub lease: LeaseId,
    /// The file.
    pub path: PathBuf,
    /// Whether the lender answers, and has what it stored.
    pub lender_answers: bool,
    /// The pages that the copy has, in bytes.
    pub held: Bytes,
    /// The pages of these that have yet to reach the file, in bytes. They would be lost with the
    /// lender if the process ended now.
    pub in_ring: Bytes,
    /// The pages that only the lender has, in bytes. They would be lost with it.
    pub lacks: Bytes,
    /// The pages that only this copy has, in bytes.
    pub lender_lacks: Bytes,
    /// Why the disk takes no pages at present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<String>,
}

/// The states of a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum LeaseState {
    /// In use.
    Ok,
    /// In use, but the lender reported that it has no room for more.
    Full,
    /// The lender cannot be reached.
    Unreachable {
        /// The time for which the lender has been unreachable, in milliseconds.
        for_ms: u64,
    },
    /// The lender has lost the stored data, or gives it to another owner. Pages there cannot be
    /// read.
    Lost,
    /// The lease's extents are moving elsewhere.
    Evacuating {
        /// The number of extents moved.
        moved: u64,
        /// The number of extents to move, when the evacuation began.
        total: u64,
    },
}

impl fmt::Display for LeaseState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ok => f.write_str("ok"),
            Self::Full => f.write_str("its lender is full"),
            Self::Lost => f.write_str("lost: its lender no longer has the pages"),
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
    /// The number of extents in it.
    pub used_extents: u64,
    /// The pages in it that hold data, in bytes.
    #[serde(default)]
    pub held: Bytes,
}

impl SpillStatus {
    /// Returns the size of the extents in it.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.used_extents * EXTENT_SIZE)
    }
}

/// Returns the state of a lease as far as it is known; `None` for the spill file.
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
        encryption: target.encryption.as_ref().map(|encryption| encryption.mode),
        copy: copy_status(lease),
        disk: disk_status(lease),
        state,
    })
}

fn copy_status(lease: &Lease) -> Option<CopyStatus> {
    let second = lease.holder.second()?;
    let target = second.copy.target.clone()?;
    let (first_lacks, lacks) = lease.missing(false);
    Some(CopyStatus {
        lease: target.lease,
        lender: target.lender,
        address: target.address,
        answer: (lease.holder.first.answers(), second.copy.answers()),
        lacks,
        first_lacks,
        late_reads: second.late_reads.load(Ordering::Relaxed),
        ring: second.lagging.as_ref().map(ring_status),
    })
}

fn ring_status(lagging: &LaggingHolder) -> RingStatus {
    RingStatus { size: lagging.ring_size(), used: lagging.in_ring() }
}

fn disk_status(lease: &Lease) -> Option<DiskCopyStatus> {
    let second = lease.holder.second()?;
    let (file, lagging) = (second.file.as_ref()?, second.lagging.as_ref()?);
    let (lender_lacks, lacks) = lease.missing(false);
    Some(DiskCopyStatus {
        lease: file.id,
        path: file.path.clone(),
        lender_answers: lease.holder.first.answers(),
        held: second.copy.tags.stored(),
        in_ring: lagging.in_ring(),
        lacks,
        lender_lacks,
        paused: lagging.trouble().as_ref().map(reason),
    })
}

/// The counters and the last error of a volume.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    read: AtomicU64,
    written: AtomicU64,
    discarded: AtomicU64,
    errors: AtomicU64,
    failed_reads: AtomicU64,
    /// Set when an extent goes to the spill file, and cleared when the file is found empty.
    pub(crate) spills: AtomicBool,
    had_no_room: AtomicBool,
    last_error: Mutex<Option<LastError>>,
}

/// The last error of a volume.
#[derive(Clone, Debug)]
pub(crate) struct LastError {
    pub(crate) text: String,
    /// Milliseconds since the Unix epoch.
    pub(crate) at_ms: u64,
    /// The lease that failed; `None` for a lack of room.
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

    /// Forgets the last error if it is the lease's, which answers again.
    pub(crate) fn recovered(&self, lease: LeaseId) {
        lock(&self.last_error).take_if(|error| error.lease == Some(lease));
    }

    /// Forgets a lack of room, because there is room again.
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

    /// Returns the number of failed operations, the number of failed reads, and the last error.
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
