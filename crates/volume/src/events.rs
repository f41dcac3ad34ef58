//! Events of a volume that its operator must know.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aquifer_page::{HostName, LeaseId};
use serde::{Deserialize, Serialize};

use crate::lock;

/// The number of events that a volume remembers.
const REMEMBERED: usize = 64;

/// An event of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// The event's number: events of a volume count from 1.
    pub number: u64,
    /// The time, in milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// The kind of event, with its details.
    #[serde(flatten)]
    pub what: Happening,
}

/// The kinds of events of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Happening {
    /// A lender did not answer before the timeout. Its pages cannot be read unless it comes back
    /// with them.
    LenderLost {
        /// The lease.
        lease: LeaseId,
        /// The lease's lender.
        lender: HostName,
        /// The last error.
        why: String,
    },
    /// A lost lender answers again.
    LenderBack {
        /// The lease.
        lease: LeaseId,
        /// The lease's lender.
        lender: HostName,
        /// The time since the last I/O that failed on the lost lender, in milliseconds.
        away_ms: u64,
    },
    /// One of two copies of a lease's pages missed a write or could not be read. The other copy
    /// serves.
    CopyBehind {
        /// The lease of the copy.
        lease: LeaseId,
        /// The lease's lender.
        lender: HostName,
        /// The last error.
        why: String,
    },
    /// Both copies of a lease's pages are whole again.
    CopiesWhole {
        /// The lease of the first copy.
        lease: LeaseId,
    },
    /// The disk takes no pages of the copies on it. Their lenders serve, and the next pages have
    /// one copy.
    DiskCopiesPaused {
        /// The error of the disk.
        why: String,
    },
    /// The disk takes pages again. The copies on it get what they lack.
    DiskCopiesResumed,
    /// A page could not be read, so the program that touched it gets SIGBUS. The volume reports
    /// this once for each loss of a lender; its status counts the failed reads.
    PageLost {
        /// The number of the page in the volume.
        page: u64,
        /// The lender and the lease, or the spill file.
        place: String,
        /// The error of the read.
        why: String,
    },
    /// Extents are in the spill file, because no lender has room.
    SpillStarted,
    /// All extents are with lenders again.
    SpillEnded,
}

impl fmt::Display for Happening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LenderLost { lease, lender, why } => {
                write!(
                    f,
                    "lender lost: {lender}, lease {lease}: {why}; \
                     its pages cannot be read unless it comes back with them"
                )
            }
            Self::LenderBack { lease, lender, away_ms } => {
                let away = Duration::from_millis(*away_ms).as_secs_f64();
                write!(f, "lender back: {lender}, lease {lease}, after {away:.1} s")
            }
            Self::CopyBehind { lease, lender, why } => {
                write!(
                    f,
                    "copy behind: {lender}, lease {lease}: {why}; the other copy serves its pages"
                )
            }
            Self::CopiesWhole { lease } => {
                write!(f, "copies whole: each page of lease {lease} has two copies again")
            }
            Self::DiskCopiesPaused { why } => {
                write!(
                    f,
                    "copies on the disk paused: {why}; the next pages have one copy, at their \
                     lenders, until the disk takes them"
                )
            }
            Self::DiskCopiesResumed => {
                f.write_str("copies on the disk resumed: they get the pages that they lack")
            }
            Self::PageLost { page, place, why } => {
                write!(
                    f,
                    "page lost: page {page} on {place} cannot be read: {why}; \
                     a program that needs it gets SIGBUS"
                )
            }
            Self::SpillStarted => {
                f.write_str("spill started: no lender has room, pages go to the local spill file")
            }
            Self::SpillEnded => f.write_str("spill ended: all pages are with lenders again"),
        }
    }
}

/// The latest events, and the wakeup of the upkeep thread.
#[derive(Debug, Default)]
pub(crate) struct Events {
    latest: Mutex<(u64, VecDeque<Event>)>,
    is_woken: Mutex<bool>,
    wakeup: Condvar,
}

impl Events {
    pub(crate) fn happened(&self, what: Happening) {
        {
            let (number, latest) = &mut *lock(&self.latest);
            *number += 1;
            if latest.len() == REMEMBERED {
                latest.pop_front();
            }
            latest.push_back(Event { number: *number, at_ms: now_ms(), what });
        }
        self.wake();
    }

    /// Returns the remembered events with a higher number.
    pub(crate) fn after(&self, number: u64) -> Vec<Event> {
        lock(&self.latest).1.iter().filter(|event| event.number > number).cloned().collect()
    }

    /// Wakes the upkeep thread.
    pub(crate) fn wake(&self) {
        *lock(&self.is_woken) = true;
        self.wakeup.notify_all();
    }

    /// Waits for a wakeup, for at most this long.
    pub(crate) fn wait(&self, most: Option<Duration>) {
        let is_woken = lock(&self.is_woken);
        let is_asleep = |is_woken: &mut bool| !*is_woken;
        let mut is_woken = match most {
            None => {
                self.wakeup.wait_while(is_woken, is_asleep).unwrap_or_else(PoisonError::into_inner)
            }
            Some(most) => {
                self.wakeup
                    .wait_timeout_while(is_woken, most, is_asleep)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0
            }
        };
        *is_woken = false;
    }
}

/// Returns the milliseconds since the Unix epoch.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_events_are_remembered_and_told_once() {
        let events = Events::default();
        (0..100).for_each(|_| events.happened(Happening::SpillStarted));
        let all = events.after(0);
        assert_eq!((all.len(), all[0].number, all[63].number), (64, 37, 100));
        assert_eq!(events.after(99).len(), 1);
        assert!(events.after(100).is_empty());
        // The events woke the thread, so this wait ends at once.
        events.wait(None);
        events.wait(Some(Duration::from_millis(1)));
        let text = serde_json::to_string(&all[0]).unwrap();
        assert!(text.contains(r#""event":"spill_started""#), "{text}");
        assert_eq!(serde_json::from_str::<Event>(&text).unwrap(), all[0]);
    }
}
