//! Execution of the controller's decisions.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use aquifer_api::status::{self, EventKind, RoleChange};
use aquifer_control::{
    self as control, Action, Controller, Event, Message, Offer, Restored, Shareable, VolumeState,
    What,
};
use aquifer_page::{Bytes, HostName, LeaseId, VolumeId};

use super::{Driver, Parts};
use crate::events::now;
use crate::peers::SayError;

/// How many decisions and role changes `status` shows.
const REMEMBERED: usize = 200;

/// Share of memory that must stay free after all swapped-out pages return: programs allocate
/// meanwhile.
const KEPT_FREE: f64 = 0.02;

/// The subject of work in progress.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Busy {
    Volume(VolumeId),
    Lease(LeaseId),
    /// A message in flight: a second copy would only queue behind it.
    Message(HostName, String),
}

/// The end of work that ran beside the driver.
#[derive(Debug)]
pub(super) enum Outcome {
    /// An action has ended; the controller gets the event, if any.
    Done(Busy, Option<Event>),
    /// Peers have sent their offers.
    Offers(Vec<Offer>),
    /// A lender has listed the leases that it does not have.
    Lost(HostName, Vec<LeaseId>),
    /// A borrower has said why it could not yet leave a lease; `None` if it gave no reason.
    Told(LeaseId, Option<String>),
    /// Volumes have reported their status.
    Volumes(Vec<status::Volume>),
}

/// Creates this host's controller from the leases and volumes of the previous agent.
pub(super) fn controller(parts: &Parts) -> Controller {
    let (memory, lend, borrow) = (&parts.config.memory, &parts.config.lend, &parts.config.borrow);
    let config = control::Config {
        upper: memory.upper,
        lower: memory.lower,
        shareable: lend
            .reserved
            .map_or(Shareable::Dynamic, |reserved| Shareable::Preconfigured { reserved }),
        lends: lend.enabled,
        borrows: borrow.enabled,
        request: borrow.request,
        max_borrowed: borrow.max,
        group: borrow.group.clone(),
        resend: memory.period.max(Duration::from_secs(1)),
        give_up: memory.period.max(Duration::from_secs(1)) * 5,
        grace: lend.grace,
        cooldown: memory.period * 10,
    };
    let found = Restored { lent: parts.lender.restored(), volumes: parts.borrower.restored() };
    // A controller's ids start at a random number; a random lease id provides one.
    Controller::restore(
        parts.config.host.clone(),
        config,
        LeaseId::random().0,
        Duration::ZERO,
        found,
    )
}

/// Converts a role to the API's type.
pub(super) fn role(role: control::Role) -> status::Role {
    match role {
        control::Role::Neutral => status::Role::Neutral,
        control::Role::Borrower => status::Role::Borrower,
        control::Role::Lender => status::Role::Lender,
    }
}

fn remember<T>(latest: &mut VecDeque<T>, new: T) {
    if latest.len() == REMEMBERED {
        latest.pop_front();
    }
    latest.push_back(new);
}

impl Driver {
    /// Passes one event to the controller, and carries out the resulting decisions and actions.
    pub(super) fn step(&mut self, event: Event) {
        let step = self.controller.step(self.started.elapsed(), event);
        for decision in &step.decisions {
            self.orders.note(decision, &self.parts.peers);
            if let What::RoleChanged { from, to } = decision.what {
                remember(
                    &mut self.role_changes,
                    RoleChange { at: now(), from: role(from), to: role(to) },
                );
            }
            self.note_decision(decision.to_string());
            if let What::Expires { borrower, .. } = &decision.what {
                let what = format!("this host {decision}");
                self.parts.events.note(EventKind::BorrowerLost, borrower, what);
            }
        }
        for action in step.actions {
            self.perform(action);
        }
        self.orders.conclude(self.controller.pending_releases() == 0);
    }

    /// Logs a decision and keeps it for the status.
    pub(super) fn note_decision(&mut self, what: String) {
        tracing::info!(role = %self.controller.role(), "{what}");
        remember(&mut self.decisions, status::Decision { at: now(), what });
    }

    /// Handles the end of work that ran beside the driver.
    pub(super) fn settle(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Offers(lenders) => {
                self.asking = false;
                self.step_period(lenders);
            }
            Outcome::Lost(lender, lost) => self.note_lost(&lender, lost),
            Outcome::Told(lease, failed) => match failed {
                Some(failed) => drop(self.told.insert(lease, failed)),
                None => drop(self.told.remove(&lease)),
            },
            Outcome::Volumes(volumes) => {
                self.looking = false;
                self.note_news(&volumes);
            }
            Outcome::Done(busy, event) => {
                self.busy.remove(&busy);
                let Some(event) = event else { return };
                self.prepare(&event);
                self.step(event.clone());
                self.orders.note_event(&event, &self.parts.borrower);
            }
        }
    }

    /// Does the driver's part before the controller takes an event.
    fn prepare(&mut self, event: &Event) {
        match event {
            Event::Activated { .. } => {
                // The lenders learn at once how long this host's I/O waits for them.
                self.renewed = None;
                self.set_gate();
            }
            Event::Deactivated { .. } => self.set_gate(),
            Event::Evacuated { lease, .. } => drop(self.failures.remove(lease)),
            Event::EvacuationFailed { lease, why, .. } => {
                self.failures.insert(*lease, why.clone());
            }
            Event::LeaseFreed { lease } => {
                self.signs.remove(lease);
                self.told.remove(lease);
                for reply in self.pending_releases.remove(lease).into_iter().flatten() {
                    let _ = reply.send(Ok(None));
                }
            }
            _ => {}
        }
    }

    /// Lets a managed cgroup swap while, and only while, this host has a volume to swap to.
    pub(super) fn set_gate(&self) {
        let Some(gate) = &self.parts.gate else { return };
        let done = match self.parts.borrower.is_active() {
            true => gate.open(),
            false => gate.shut(),
        };
        if let Err(error) = done {
            tracing::warn!("cannot change whether the cgroup may swap: {error}");
        }
    }

    fn perform(&mut self, action: Action) {
        let (lender, borrower) = (self.parts.lender.clone(), self.parts.borrower.clone());
        match action {
            Action::Send { to, message } => self.say(to, message),
            Action::Activate(volume) => {
                let (id, priority) = (volume.volume, self.orders.priority_of(volume.volume));
                self.beside(Busy::Volume(id), move || match borrower.activate(&volume, priority) {
                    Ok(()) => Event::Activated { volume: id },
                    Err(why) => Event::ActivationFailed { volume: id, why },
                });
            }
            Action::Deactivate { volume } => {
                let fits = self.fits_without(volume);
                self.beside(Busy::Volume(volume), move || {
                    match fits.and_then(|()| borrower.deactivate(volume)) {
                        Ok(()) => Event::Deactivated { volume },
                        Err(why) => Event::DeactivationFailed { volume, why },
                    }
                });
            }
            Action::Evacuate { volume, lease, onto } => {
                self.beside(Busy::Lease(lease), move || {
                    let (unused, moved) = borrower.evacuate(volume, lease, &onto);
                    match moved {
                        Ok(()) => Event::Evacuated { lease, unused },
                        Err(why) => Event::EvacuationFailed { lease, unused, why },
                    }
                })
            }
            Action::OpenLease(record) => self.beside(Busy::Lease(record.lease), move || {
                let lease = record.lease;
                match lender.open_lease(&record) {
                    Ok(uris) => Event::LeaseOpened { lease, uris },
                    Err(why) => Event::LeaseFailed { lease, why },
                }
            }),
            Action::FreeLease { lease } => self.beside_if(Busy::Lease(lease), move || {
                match lender.free_lease(lease) {
                    Ok(()) => Some(Event::LeaseFreed { lease }),
                    // The controller orders the removal again.
                    Err(error) => {
                        tracing::error!(%lease, "cannot free the memory of a lease yet: {error}");
                        None
                    }
                }
            }),
        }
    }

    /// Checks that the pages swapped to a volume, and to the others that go with it, fit into
    /// memory. The check must precede swapoff: in a cgroup the kernel would make room by killing
    /// programs.
    fn fits_without(&self, volume: VolumeId) -> Result<(), String> {
        if self.parts.borrower.dead().contains(&volume) {
            // The pages of a dead volume are lost.
            return Ok(());
        }
        let reading = self.parts.source.read().map_err(|error| error.to_string())?;
        // The volume may hold pages of other cgroups, which have their own memory for them.
        let leaving = self.controller.volumes().into_iter();
        let leaving = leaving.filter(|other| other.state == VolumeState::Deactivating);
        let leaving: BTreeSet<_> = leaving.map(|other| other.volume).chain([volume]).collect();
        let back = self.parts.borrower.comes_back(&leaving)?.min(reading.swap_used);
        let free = reading.total.saturating_sub(reading.used);
        let keep = reading.total.scaled(KEPT_FREE);
        if back == Bytes::ZERO || back.saturating_add(keep) <= free {
            return Ok(());
        }
        Err(format!(
            "{back} is swapped out to {} and does not fit into memory: {free} of {} is free",
            match leaving.len() {
                1 => format!("volume {volume}"),
                count => format!("the {count} volumes that are given back"),
            },
            reading.total
        ))
    }

    /// Runs `work` on a blocking thread, unless work on the same subject is in progress.
    fn beside(&mut self, busy: Busy, work: impl FnOnce() -> Event + Send + 'static) {
        self.beside_if(busy, move || Some(work()));
    }

    fn beside_if(&mut self, busy: Busy, work: impl FnOnce() -> Option<Event> + Send + 'static) {
        if !self.busy.insert(busy.clone()) {
            return;
        }
        let outcomes = self.outcomes.clone();
        tokio::task::spawn_blocking(move || {
            // The send fails only while the agent ends.
            let _ = outcomes.send(Outcome::Done(busy, work()));
        });
    }

    fn say(&mut self, to: HostName, message: Message) {
        let busy = Busy::Message(to.clone(), format!("{message:?}"));
        if !self.busy.insert(busy.clone()) {
            return;
        }
        let (peers, outcomes) = (self.parts.peers.clone(), self.outcomes.clone());
        tokio::spawn(async move {
            let said = peers.say(&to, &message).await;
            let event = match said {
                Ok(failed) => {
                    if let Message::MemLenFin { lease } = message {
                        // The send fails only while the agent ends.
                        let _ = outcomes.send(Outcome::Told(lease, failed));
                    }
                    Some(Event::Delivered { to, message })
                }
                Err(SayError::Refused(why)) => Some(Event::Refused { by: to, message, why }),
                Err(SayError::Lost(why)) => {
                    tracing::debug!("{message:?} did not reach {to}, and may be sent again: {why}");
                    None
                }
            };
            outcomes.send(Outcome::Done(busy, event))
        });
    }
}
