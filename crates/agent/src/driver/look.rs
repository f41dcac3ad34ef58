//! The driver's checks in each period besides memory: signs of life of borrowers and lenders,
//! volumes, OOM kills, ended VMs.

use std::collections::BTreeSet;
use std::time::{Duration, Instant, SystemTime};

use aquifer_api::message::Renew;
use aquifer_api::status::{EventKind, Volume};
use aquifer_control::{Event, VolumeState};
use aquifer_page::{HostName, LeaseId};

use super::Driver;
use super::perform::{Busy, Outcome};
use super::watch::{News, lease_lost};

/// Minimum time between two looks at the volumes.
const LOOK: Duration = Duration::from_secs(1);

/// Minimum time between two renewals at lenders that a volume misses.
const ASK_AGAIN: Duration = Duration::from_secs(5);

impl Driver {
    /// Notes borrowers' connections, which are as good a sign of life as a message.
    pub(super) fn note_signs(&mut self) {
        let now = Instant::now();
        let due = self.parts.config.lend.grace / 8;
        let stale = |lease: &LeaseId| {
            self.signs.get(lease).is_none_or(|last| now.duration_since(*last) >= due)
        };
        let lent = self.controller.lent();
        if !lent.iter().any(|lent| stale(&lent.lease.lease)) {
            return;
        }
        let seen: Vec<_> = self.parts.lender.in_use().into_iter().filter(stale).collect();
        seen.into_iter().for_each(|lease| self.saw(lease));
    }

    pub(super) fn saw(&mut self, lease: LeaseId) {
        self.signs.insert(lease, Instant::now());
        self.step(Event::BorrowerSeen { lease });
    }

    /// Notes that a borrower lives; returns those of its leases that this host does not have.
    pub(super) fn renewed(&mut self, from: &HostName, renew: Renew) -> Vec<LeaseId> {
        if let Some(io_timeout) = renew.io_timeout_ms {
            self.io_timeout_ms.insert(from.clone(), io_timeout);
        }
        let (here, lost): (Vec<_>, Vec<_>) =
            renew.leases.into_iter().partition(|lease| self.parts.lender.is_of(*lease, from));
        here.into_iter().for_each(|lease| self.saw(lease));
        lost
    }

    /// Tells lenders, every eighth of the grace time, that this host still needs its leases, with
    /// or without a connection. Lenders that a volume misses hear it every [`ASK_AGAIN`].
    pub(super) fn renew(&mut self) {
        let all =
            self.renewed.is_none_or(|last| last.elapsed() >= self.parts.config.lend.grace / 8);
        let missed = self.watch.away();
        if !all && (missed.is_empty() || self.asked_missed.elapsed() < ASK_AGAIN) {
            return;
        }
        self.asked_missed = Instant::now();
        if all {
            self.renewed = Some(Instant::now());
        }
        let io_timeout_ms = u64::try_from(self.parts.config.borrow.io_timeout.as_millis()).ok();
        for (lender, leases) in self.parts.borrower.leases_by_lender() {
            if !all && !missed.contains(&lender) {
                continue;
            }
            let (peers, outcomes) = (self.parts.peers.clone(), self.outcomes.clone());
            tokio::spawn(async move {
                let lost = peers.renew(&lender, Renew { leases, io_timeout_ms }).await;
                outcomes.send(Outcome::Lost(lender, lost))
            });
        }
    }

    /// Notes leases that this host holds and their lender does not have.
    pub(super) fn note_lost(&mut self, lender: &HostName, lost: Vec<LeaseId>) {
        let held: BTreeSet<_> =
            self.controller.borrowed().iter().map(|held| held.lease.lease).collect();
        self.lost.retain(|lease| held.contains(lease));
        for lease in lost.into_iter().filter(|lease| held.contains(lease)) {
            if self.lost.insert(lease) && !self.watch.has_lost(lease) {
                self.note_one(lease_lost(lender, lease));
            }
        }
    }

    /// Looks at the volumes on a blocking thread, because each is another process.
    pub(super) fn look_at_volumes(&mut self) {
        if self.looked.elapsed() < LOOK || self.looking {
            return;
        }
        self.looked = Instant::now();
        if !self.parts.borrower.is_active() {
            self.note_news(&[]);
            return;
        }
        self.looking = true;
        let (borrower, outcomes) = (self.parts.borrower.clone(), self.outcomes.clone());
        tokio::task::spawn_blocking(move || _ = outcomes.send(Outcome::Volumes(borrower.status())));
    }

    pub(super) fn note_news(&mut self, volumes: &[Volume]) {
        for news in self.watch.look(volumes, &self.lost) {
            self.note_one(news);
        }
    }

    fn note_one(&self, News { kind, who, what }: News) {
        self.parts.events.note(kind, who, what);
    }

    /// Tells the controller of leases that a volume has left by an order of the previous agent.
    pub(super) fn note_left(&mut self) {
        let volumes = self.controller.volumes();
        let active =
            |volume| volumes.iter().any(|v| v.volume == volume && v.state == VolumeState::Active);
        let borrowed = self.controller.borrowed();
        // A volume's record does not list leases that are still on their way into it.
        let moving: BTreeSet<_> = borrowed
            .iter()
            .filter(|held| self.busy.contains(&Busy::Lease(held.lease.lease)))
            .map(|held| held.volume)
            .collect();
        let borrower = &self.parts.borrower;
        let idle =
            borrowed.iter().filter(|held| active(held.volume) && !moving.contains(&held.volume));
        let left: Vec<_> = idle
            .filter(|held| !self.busy.contains(&Busy::Volume(held.volume)))
            .filter(|held| borrower.has_left(held.volume, held.lease.lease))
            .map(|held| held.lease.lease)
            .collect();
        for lease in left {
            self.step(Event::Evacuated { lease, unused: Vec::new() });
        }
    }

    /// Notes programs that the kernel has killed since the last look.
    pub(super) fn note_kills(&mut self) {
        let kills = self.parts.source.oom_kills();
        if let (Some(now), Some(before)) = (kills, self.oom_kills)
            && now > before
        {
            let (count, name) = (now - before, self.parts.source.name());
            let what =
                format!("the kernel killed {count} program(s) of {name} because memory ran out");
            self.parts.events.note(EventKind::OomKill, name, what);
        }
        self.oom_kills = kills.or(self.oom_kills);
    }

    /// Notes VMs of this host that have ended since the last look.
    pub(super) fn note_ended_vms(&mut self) {
        let ended = match aquifer_vm::process::ended(&self.parts.config.state, self.vms_seen) {
            Ok(ended) => ended,
            Err(error) => return tracing::debug!("cannot list the VMs that ended: {error}"),
        };
        for vm in ended {
            self.vms_seen =
                self.vms_seen.max(SystemTime::UNIX_EPOCH + Duration::from_millis(vm.at_ms));
            self.parts.events.note(EventKind::VmEnded, &vm.name, vm.cause.to_string());
        }
    }
}
