//! The news in the status of a volume.

use std::collections::BTreeSet;
use std::fmt;

use aquifer_page::{HostName, LeaseId};
use aquifer_volume::{Event, Happening, LeaseState, LeaseStatus, VolumeStatus};
use serde::Serialize;

/// A message for the user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(super) enum Message {
    /// An event that the volume noted.
    Event(Event),
    /// A change that the volume's status shows.
    Seen(Seen),
}

/// A change in a volume's status that is no event of the volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Seen {
    /// The volume dropped events before they could be reported.
    EventsMissed {
        /// How many.
        count: u64,
    },
    /// A lender does not answer; I/O waits for it.
    LenderSilent {
        /// The lease.
        lease: LeaseId,
        /// Its lender.
        lender: HostName,
    },
    /// The lender answers again, before I/O failed.
    LenderAnswers {
        /// The lease.
        lease: LeaseId,
        /// Its lender.
        lender: HostName,
    },
    /// A lender has lost the pages stored there.
    PagesForgotten {
        /// The lease.
        lease: LeaseId,
        /// Its lender.
        lender: HostName,
    },
    /// The process of the volume died.
    VolumeDied,
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Event(event) => event.what.fmt(f),
            Self::Seen(seen) => seen.fmt(f),
        }
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EventsMissed { count } => write!(f, "{count} events missed"),
            Self::LenderSilent { lease, lender } => {
                write!(
                    f,
                    "pages unreachable: {lender}, lease {lease}, does not answer; \
                     programs that touch its pages wait"
                )
            }
            Self::LenderAnswers { lease, lender } => {
                write!(f, "pages reachable: {lender}, lease {lease}, answers again")
            }
            Self::PagesForgotten { lease, lender } => {
                write!(f, "pages lost: {lender} has lost the pages of lease {lease}")
            }
            Self::VolumeDied => f.write_str("pages lost: the process that served the swap died"),
        }
    }
}

/// The state of a volume as reported so far.
#[derive(Debug, Default)]
pub(super) struct News {
    /// The number of the last reported event.
    told: u64,
    silent: BTreeSet<LeaseId>,
    forgotten: BTreeSet<LeaseId>,
    is_dead: bool,
    lost_page: bool,
}

impl News {
    /// Returns whether pages of the volume were lost.
    pub(super) fn has_lost_pages(&self) -> bool {
        self.lost_page || self.is_dead || !self.forgotten.is_empty()
    }

    /// Returns the news in this status.
    pub(super) fn of(&mut self, status: &VolumeStatus) -> Vec<Message> {
        let events: Vec<_> =
            status.events.iter().filter(|event| event.number > self.told).collect();
        let mut messages = Vec::new();
        if let Some(count @ 1..) = events.first().map(|first| first.number - self.told - 1) {
            messages.push(Message::Seen(Seen::EventsMissed { count }));
        }
        // A state may be older or newer than an event of the same lease: the event counts.
        let mut noted = BTreeSet::new();
        for event in events {
            self.told = event.number;
            match event.what {
                Happening::LenderLost { lease, .. } => {
                    _ = (noted.insert(lease), self.silent.insert(lease))
                }
                Happening::LenderBack { lease, .. } => {
                    _ = (noted.insert(lease), self.silent.remove(&lease))
                }
                Happening::PageLost { .. } => self.lost_page = true,
                Happening::SpillStarted
                | Happening::SpillEnded
                | Happening::CopyBehind { .. }
                | Happening::DiskCopiesPaused { .. }
                | Happening::DiskCopiesResumed
                | Happening::CopiesWhole { .. } => {}
            }
            messages.push(Message::Event(event.clone()));
        }
        let states = status.leases.iter().filter(|lease| !noted.contains(&lease.lease));
        messages.extend(states.filter_map(|lease| self.of_lease(lease)).map(Message::Seen));
        messages
    }

    fn of_lease(&mut self, status: &LeaseStatus) -> Option<Seen> {
        let (lease, lender) = (status.lease, status.lender.clone());
        match status.state {
            LeaseState::Unreachable { .. } => {
                self.silent.insert(lease).then_some(Seen::LenderSilent { lease, lender })
            }
            LeaseState::Lost => {
                self.silent.remove(&lease);
                self.forgotten.insert(lease).then_some(Seen::PagesForgotten { lease, lender })
            }
            LeaseState::Ok | LeaseState::Full => {
                self.silent.remove(&lease).then_some(Seen::LenderAnswers { lease, lender })
            }
            // An evacuation says nothing about its lender.
            LeaseState::Evacuating { .. } => None,
        }
    }

    /// Returns the news if the volume's process is found dead.
    pub(super) fn of_dead(&mut self) -> Vec<Message> {
        let is_news = !std::mem::replace(&mut self.is_dead, true);
        is_news.then_some(Message::Seen(Seen::VolumeDied)).into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use aquifer_page::{Bytes, VolumeId};

    use super::*;

    const LEASE: LeaseId = LeaseId(1);

    fn lender() -> HostName {
        "b".parse().unwrap()
    }

    fn status(state: LeaseState, events: &[(u64, Happening)]) -> VolumeStatus {
        let event = |(number, what): &(u64, Happening)| Event {
            number: *number,
            at_ms: 0,
            what: what.clone(),
        };
        let address = aquifer_transport::Address::Unix("/b".into());
        let lease = LeaseStatus {
            lease: LEASE,
            lender: lender(),
            address,
            extents: 1,
            used_extents: 1,
            copy: None,
            disk: None,
            encryption: None,
            state,
        };
        VolumeStatus {
            id: VolumeId(1),
            capacity: Bytes::ZERO,
            placed_extents: 0,
            written: Bytes::ZERO,
            traffic: aquifer_volume::Traffic::default(),
            leases: vec![lease],
            spill: None,
            errors: 0,
            failed_reads: 0,
            last_error_at_ms: None,
            last_error: None,
            events: events.iter().map(event).collect(),
        }
    }

    fn lines(news: &mut News, state: LeaseState, events: &[(u64, Happening)]) -> Vec<String> {
        news.of(&status(state, events)).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_lender_that_is_lost_and_back_is_told_once_each() {
        let mut news = News::default();
        let silent = || LeaseState::Unreachable { for_ms: 1 };
        let lost = (1, Happening::LenderLost { lease: LEASE, lender: lender(), why: "it".into() });
        let page = (2, Happening::PageLost { page: 7, place: "b".into(), why: "it".into() });
        let back = (3, Happening::LenderBack { lease: LEASE, lender: lender(), away_ms: 1 });
        assert_eq!(lines(&mut news, LeaseState::Ok, &[]), [] as [String; 0]);
        let told = lines(&mut news, silent(), &[]);
        assert!(told.len() == 1 && told[0].starts_with("pages unreachable: b, lease"), "{told:?}");
        assert_eq!(lines(&mut news, silent(), &[]), [] as [String; 0]);
        // The states are older than the events.
        let told = lines(&mut news, LeaseState::Ok, &[lost.clone(), page.clone()]);
        assert!(
            told.len() == 2
                && told[0].starts_with("lender lost")
                && told[1].starts_with("page lost")
        );
        assert_eq!(lines(&mut news, silent(), &[lost.clone(), page.clone()]), [] as [String; 0]);
        let told = lines(&mut news, silent(), &[lost, page, back.clone()]);
        assert!(told.len() == 1 && told[0].starts_with("lender back"), "{told:?}");
        assert_eq!(lines(&mut news, LeaseState::Ok, &[back]), [] as [String; 0]);
        assert!(news.has_lost_pages());
    }

    #[test]
    fn a_lender_that_answers_before_io_fails_lost_nothing() {
        let mut news = News::default();
        lines(&mut news, LeaseState::Unreachable { for_ms: 1 }, &[]);
        lines(&mut news, LeaseState::Evacuating { moved: 0, total: 1 }, &[]);
        let told = lines(&mut news, LeaseState::Ok, &[]);
        assert!(told.len() == 1 && told[0].ends_with("answers again"), "{told:?}");
        assert!(!news.has_lost_pages());
        let told = lines(&mut news, LeaseState::Lost, &[]);
        assert!(told.len() == 1 && told[0].starts_with("pages lost"), "{told:?}");
        assert!(news.has_lost_pages());
    }

    #[test]
    fn events_that_the_volume_forgot_are_counted() {
        let mut news = News::default();
        let told = lines(&mut news, LeaseState::Ok, &[(3, Happening::SpillStarted)]);
        assert_eq!(told[0], "2 events missed");
        let told = lines(&mut news, LeaseState::Ok, &[(5, Happening::SpillEnded)]);
        assert_eq!((told.len(), told[0].as_str()), (2, "1 events missed"));
    }

    #[test]
    fn a_dead_process_is_told_once() {
        let mut news = News::default();
        assert_eq!((news.of_dead().len(), news.of_dead().len()), (1, 0));
        assert!(news.has_lost_pages());
    }
}
