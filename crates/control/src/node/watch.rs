//! Changes of borrowed memory, found by comparing each look at the volumes with the previous one.

use std::collections::{BTreeMap, BTreeSet};

use aquifer_page::{Bytes, HostName, LeaseId, VolumeId};

use super::{EventKind, Health, LeaseReading, Notice, VolumeReading};

/// The state at the last look.
#[derive(Clone, Debug, Default)]
pub(super) struct Watch {
    volumes: BTreeMap<VolumeId, Seen>,
    away: BTreeMap<LeaseId, HostName>,
    lost: BTreeSet<LeaseId>,
}

#[derive(Clone, Debug, Default)]
struct Seen {
    spilled: Bytes,
    error: Option<String>,
}

/// Returns the event for a lender that no longer has a lease or its pages.
pub(super) fn lease_lost(lender: &HostName, lease: LeaseId) -> Notice {
    let what = format!("{lender} has lost lease {lease}, with the pages that this host stored");
    Notice { kind: EventKind::LeaseLost, who: lender.to_string(), what }
}

impl Watch {
    /// Tells whether a volume reported this lease lost at the last look.
    pub(super) fn has_lost(&self, lease: LeaseId) -> bool {
        self.lost.contains(&lease)
    }

    /// Tells whether pages of a volume were in its spill file at the last look.
    pub(super) fn has_spilled(&self, volume: VolumeId) -> bool {
        self.volumes.get(&volume).is_some_and(|seen| seen.spilled > Bytes::ZERO)
    }

    /// Returns the lenders that a volume could not reach at the last look.
    pub(super) fn away(&self) -> BTreeSet<HostName> {
        self.away.values().cloned().collect()
    }

    /// Takes a look and returns the changes since the last one. Losses of the leases in `known`
    /// already have an event.
    pub(super) fn look(
        &mut self,
        volumes: &[VolumeReading],
        known: &BTreeSet<LeaseId>,
    ) -> Vec<Notice> {
        let mut news = Vec::new();
        let before = std::mem::take(&mut self.volumes);
        for volume in volumes {
            let last = before.get(&volume.volume).cloned().unwrap_or_default();
            news.extend(spill(volume, last.spilled));
            if let Some(error) =
                volume.last_error.clone().filter(|error| last.error.as_ref() != Some(error))
            {
                let who = volume.volume.to_string();
                news.push(Notice { kind: EventKind::PageUnreachable, who, what: error });
            }
            let seen = Seen { spilled: volume.spilled, error: volume.last_error.clone() };
            self.volumes.insert(volume.volume, seen);
        }
        let held =
            volumes.iter().flat_map(|volume| volume.leases.iter().map(move |held| (volume, held)));
        let (mut away, mut lost) = (BTreeMap::new(), BTreeSet::new());
        for (volume, held) in held {
            let was_away = self.away.contains_key(&held.lease);
            let is_lost = held.health == Health::Lost;
            // A lender that returns with an empty store does not count as back.
            let is_away = held.health == Health::Unreachable || (is_lost && was_away);
            if is_away {
                away.insert(held.lease, held.lender.clone());
            }
            news.extend((is_away != was_away).then(|| change(volume, held, is_away)));
            if is_lost
                && lost.insert(held.lease)
                && !self.has_lost(held.lease)
                && !known.contains(&held.lease)
            {
                news.push(lease_lost(&held.lender, held.lease));
            }
        }
        (self.away, self.lost) = (away, lost);
        news
    }
}

fn change(volume: &VolumeReading, held: &LeaseReading, is_away: bool) -> Notice {
    let LeaseReading { lease, lender, placed, .. } = held;
    let (kind, what) = match is_away {
        true => (
            EventKind::LenderLost,
            format!(
                "{lender} does not answer: I/O on {placed} of volume {} in lease {lease} waits",
                volume.volume
            ),
        ),
        false => (EventKind::LenderBack, format!("{lender} answers again with lease {lease}")),
    };
    Notice { kind, who: lender.to_string(), what }
}

fn spill(volume: &VolumeReading, before: Bytes) -> Option<Notice> {
    let (now, who) = (volume.spilled, volume.volume.to_string());
    let (kind, what) = match now.cmp(&before) {
        std::cmp::Ordering::Equal => return None,
        std::cmp::Ordering::Greater => (
            EventKind::Spill,
            format!("{now} is in the local spill file, because no lender has room for it"),
        ),
        std::cmp::Ordering::Less => {
            (EventKind::SpillBack, format!("{now} is in the local spill file, down from {before}"))
        }
    };
    Some(Notice { kind, who, what })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: LeaseId = LeaseId(1);

    fn volume(health: Health, spilled: u64, error: Option<&str>) -> VolumeReading {
        let lender = "b".parse().expect("a name");
        let placed = Bytes::mib(64);
        let lease = LeaseReading { lease: LEASE, lender, placed, health, copy: None };
        VolumeReading {
            volume: VolumeId(0),
            spilled: Bytes(spilled),
            last_error: error.map(str::to_owned),
            takes_copies: true,
            leases: vec![lease],
        }
    }

    #[test]
    fn each_change_is_told_once() {
        let mut watch = Watch::default();
        let mut kinds = |health, spilled: u64, error: Option<&str>| {
            let news = watch.look(&[volume(health, spilled, error)], &BTreeSet::new());
            news.into_iter().map(|news| news.kind).collect::<Vec<_>>()
        };
        let (ok, away) = (Health::Ok, Health::Unreachable);
        assert_eq!(kinds(ok, 0, None), []);
        assert_eq!(kinds(away, 0, None), [EventKind::LenderLost]);
        assert_eq!(kinds(away, 0, Some("page 3")), [EventKind::PageUnreachable]);
        assert_eq!(kinds(ok, 1 << 26, Some("page 3")), [EventKind::Spill, EventKind::LenderBack]);
        assert_eq!(kinds(ok, 0, Some("page 3")), [EventKind::SpillBack]);
        assert_eq!(kinds(ok, 0, Some("page 4")), [EventKind::PageUnreachable]);
    }

    #[test]
    fn a_lender_that_comes_back_empty_is_lost_and_not_back() {
        let mut watch = Watch::default();
        let told = BTreeSet::from([LEASE]);
        let mut kinds = |health, known: &BTreeSet<LeaseId>| {
            let news = watch.look(&[volume(health, 0, None)], known);
            news.into_iter().map(|news| news.kind).collect::<Vec<_>>()
        };
        let none = BTreeSet::new();
        assert_eq!(kinds(Health::Unreachable, &none), [EventKind::LenderLost]);
        assert_eq!(kinds(Health::Lost, &none), [EventKind::LeaseLost]);
        assert_eq!(kinds(Health::Lost, &none), []);
        assert_eq!(kinds(Health::Ok, &none), [EventKind::LenderBack]);
        assert_eq!(kinds(Health::Lost, &told), [], "its lender has said so itself");
    }
}
