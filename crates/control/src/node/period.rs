//! The work of a monitoring period besides Algorithm 1: signs of life of borrowers and lenders,
//! volumes, OOM kills, ended VMs.

use std::collections::BTreeSet;
use std::time::Duration;

use aquifer_page::{HostName, LeaseId, VolumeId};

use super::watch::lease_lost;
use super::{EventKind, Found, Node, Output, Readings, VolumeReading, Wanted, Work};
use crate::{Event, Subject, VolumeState, VolumeStatus};

/// Minimum time between two looks at the volumes.
const LOOK: Duration = Duration::from_secs(1);

/// Minimum time between two searches for dead volumes.
const CLEARING: Duration = Duration::from_secs(1);

/// Minimum time between two renewals at lenders that a volume misses.
const ASK_AGAIN: Duration = Duration::from_secs(5);

impl Node {
    /// Returns the costly readings that the next period needs.
    pub fn wanted(&self, now: Duration) -> Wanted {
        let lent = self.controller.lent();
        Wanted {
            connected: lent.iter().any(|lent| self.is_stale(lent.lease.lease, now)),
            vacated: (now.saturating_sub(self.borrowing.cleared) >= CLEARING)
                .then(|| self.idle_leases()),
        }
    }

    /// Runs one monitoring period (\[Ge23\], Algorithm 1, line 1).
    pub(super) fn period(&mut self, readings: Readings) {
        let Readings { memory, own, stored, connected, oom_kills, ended_vms, .. } = readings;
        let (found, own_keys) = (readings.found, readings.own_keys);
        self.own.memory = memory;
        // At once: this host may grant a request while the period waits for offers.
        self.note_own(own);
        if let Some(connected) = connected {
            self.note_connections(&connected.into_iter().collect());
        }
        self.renew();
        self.note_kills(oom_kills);
        for (vm, cause) in ended_vms {
            self.note(EventKind::VmEnded, vm, cause);
        }
        self.look_at_volumes();
        self.watch_vms();
        self.size_caches();
        self.keep_copies();
        self.rotate_keys(&own_keys);
        self.part_with_former_peers();
        self.note_drained();
        if let Some(found) = found {
            self.clear_away(found);
        }
        match self.wants_offers() {
            true => self.ask_offers(),
            false => self.step_period(Vec::new(), stored),
        }
    }

    /// Takes borrowers' connections as signs of life, as good as messages. A connection may have
    /// ended at any time since the last look. So the silence of a borrower begins when this host
    /// first misses it, and lasts the whole grace before the lease expires.
    fn note_connections(&mut self, connected: &BTreeSet<LeaseId>) {
        let lent = self.controller.lent().into_iter().map(|lent| lent.lease.lease);
        let stale: Vec<_> = lent.filter(|lease| self.is_stale(*lease, self.now)).collect();
        for lease in stale {
            if connected.contains(&lease) {
                self.saw(lease);
            } else if self.lending.signs.contains_key(&lease)
                && !self.lending.missed.contains(&lease)
            {
                self.saw(lease);
                self.lending.missed.insert(lease);
            }
        }
    }

    /// Tells whether the last sign of life of a lease's borrower is old.
    fn is_stale(&self, lease: LeaseId, now: Duration) -> bool {
        let due = self.controller.facts().config.grace / 8;
        let last = self.lending.signs.get(&lease);
        last.is_none_or(|last| now.saturating_sub(*last) >= due)
    }

    /// Tells lenders, every eighth of the grace time, that this host still needs its leases, with
    /// or without a connection. Lenders that a volume misses hear it every [`ASK_AGAIN`].
    fn renew(&mut self) {
        let due = self.controller.facts().config.grace / 8;
        let all = self.borrowing.renewed.is_none_or(|last| self.passed(due, last));
        let missed = self.borrowing.watch.away();
        if all {
            self.borrowing.renewed = Some(self.now);
        } else if missed.is_empty() || !self.passed(ASK_AGAIN, self.borrowing.asked_missed) {
            return;
        }
        self.borrowing.asked_missed = self.now;
        self.outputs.push(Output::Renew { only: (!all).then_some(missed) });
    }

    /// Notes leases that this host holds and their lender does not have.
    pub(super) fn note_lost(&mut self, lender: &HostName, lost: Vec<LeaseId>) {
        let held: BTreeSet<_> =
            self.controller.borrowed().iter().map(|held| held.lease.lease).collect();
        self.borrowing.lost.retain(|lease| held.contains(lease));
        for lease in lost.into_iter().filter(|lease| held.contains(lease)) {
            if self.borrowing.lost.insert(lease) && !self.borrowing.watch.has_lost(lease) {
                self.outputs.push(Output::Notice(lease_lost(lender, lease)));
            }
        }
    }

    fn look_at_volumes(&mut self) {
        if !self.borrowing.looking && self.passed(LOOK, self.borrowing.looked) {
            (self.borrowing.looked, self.borrowing.looking) = (self.now, true);
            self.outputs.push(Output::LookAtVolumes);
        }
    }

    pub(super) fn seen(&mut self, volumes: &[VolumeReading]) {
        self.borrowing.looking = false;
        self.see_copies(volumes);
        let news = self.borrowing.watch.look(volumes, &self.borrowing.lost);
        self.outputs.extend(news.into_iter().map(Output::Notice));
    }

    /// Returns the leases of volumes in use on which no work is in progress.
    fn idle_leases(&self) -> Vec<(VolumeId, LeaseId)> {
        let active = |volume: &VolumeStatus| volume.state == VolumeState::Active;
        let volumes = self.controller.volumes();
        let active: BTreeSet<_> =
            volumes.into_iter().filter(active).map(|volume| volume.volume).collect();
        let borrowed = self.controller.borrowed();
        // A volume's record does not list leases that are still on their way into it.
        let moving: BTreeSet<_> = borrowed
            .iter()
            .filter(|held| self.is_worked_on(held.lease.lease))
            .map(|held| held.volume)
            .collect();
        borrowed
            .iter()
            .filter(|held| active.contains(&held.volume) && !moving.contains(&held.volume))
            .filter(|held| !self.work.contains(&Work::Volume(held.volume)))
            .map(|held| (held.volume, held.lease.lease))
            .collect()
    }

    /// Gives back leases that a volume has left by an order of the previous agent. Also returns
    /// volumes without a process: otherwise the kernel keeps swapping to a device without a server.
    fn clear_away(&mut self, found: Found) {
        self.borrowing.cleared = self.now;
        // Work on a lease may have begun since the search.
        let idle = self.idle_leases().into_iter().map(|(_, lease)| lease);
        let vacated: Vec<_> = idle.filter(|lease| found.vacated.contains(lease)).collect();
        for lease in vacated {
            self.step(Event::Evacuated { lease, unused: Vec::new() });
        }
        self.follow_regions(found.moved, found.arrived, found.missed);
        found.gone.into_iter().for_each(|volume| self.region_gone(volume));
        for volume in found.dead {
            if !self.work.contains(&Work::Volume(volume)) {
                let what = format!("removes volume {volume}: its process has died");
                self.log(what, vec![Subject::Volume(volume)]);
                self.step(Event::Return { volume: Some(volume) });
            }
        }
    }

    /// Notes programs that the kernel has killed since the last reading.
    fn note_kills(&mut self, kills: Option<u64>) {
        if let (Some(now), Some(before)) = (kills, self.own.oom_kills)
            && now > before
        {
            let (count, name) = (now - before, self.settings.source.clone());
            let what =
                format!("the kernel killed {count} program(s) of {name} because memory ran out");
            self.note(EventKind::OomKill, name, what);
        }
        self.own.oom_kills = kills.or(self.own.oom_kills);
    }
}
