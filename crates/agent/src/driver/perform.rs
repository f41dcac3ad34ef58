//! Carrying out what the controller decides.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aquifer_api::status::{self, RoleChange};
use aquifer_control::{
    self as control, Action, Controller, Event, Message, Offer, Restored, Shareable, What,
};
use aquifer_page::{Bytes, HostName, LeaseId, VolumeId};

use super::{Driver, Parts};

/// How many decisions `status` shows.
const REMEMBERED: usize = 200;

/// The share of memory that must be left once all that was swapped out is back: programs go on allocating meanwhile.
const KEPT_FREE: f64 = 0.02;

/// What is being carried out.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Busy {
    Volume(VolumeId),
    Lease(LeaseId),
    /// A message on its way: the same one again would only queue up behind it.
    Message(HostName, String),
}

/// Something that ran beside the driver has ended.
#[derive(Debug)]
pub(super) enum Outcome {
    /// An action, with what the controller is to know of it.
    Done(Busy, Option<Event>),
    /// Peers have said what they could lend.
    Offers(Vec<Offer>),
}

/// A controller for this host, with what outlived the agent before this one.
pub(super) fn controller(parts: &Parts) -> Controller {
    let (memory, lend, borrow) = (&parts.config.memory, &parts.config.lend, &parts.config.borrow);
    let reserved = match lend.enabled {
        true => lend.reserved,
        false => Some(Bytes(u64::MAX)),
    };
    let config = control::Config {
        upper: memory.upper,
        lower: memory.lower,
        shareable: reserved.map_or(Shareable::Dynamic, |reserved| Shareable::Preconfigured { reserved }),
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
    // Ids of controllers begin at random places; a lease id is as good a source as any.
    Controller::restore(parts.config.host.clone(), config, LeaseId::random().0, Duration::ZERO, found)
}

/// The role in the words of the API.
pub(super) fn role(role: control::Role) -> status::Role {
    match role {
        control::Role::Neutral => status::Role::Neutral,
        control::Role::Borrower => status::Role::Borrower,
        control::Role::Lender => status::Role::Lender,
    }
}

/// Seconds since the epoch.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn remember<T>(latest: &mut VecDeque<T>, new: T) {
    if latest.len() == REMEMBERED {
        latest.pop_front();
    }
    latest.push_back(new);
}

impl Driver {
    /// Lets the controller take one event and carries out what comes of it.
    pub(super) fn step(&mut self, event: Event) {
        let step = self.controller.step(self.started.elapsed(), event);
        for decision in &step.decisions {
            self.orders.note(decision, &self.parts.peers);
            if let What::RoleChanged { from, to } = decision.what {
                remember(&mut self.role_changes, RoleChange { at: now(), from: role(from), to: role(to) });
            }
            self.note_decision(decision.to_string());
        }
        for action in step.actions {
            self.perform(action);
        }
        self.orders.conclude(self.controller.unconfirmed_fins() == 0);
    }

    /// Logs what was decided and keeps it for the status.
    pub(super) fn note_decision(&mut self, what: String) {
        tracing::info!(role = %self.controller.role(), "{what}");
        remember(&mut self.decisions, status::Decision { at: now(), what });
    }

    /// Takes note of something that has ended.
    pub(super) fn settle(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Offers(lenders) => {
                self.asking = false;
                self.step_period(lenders);
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

    /// What must be done before the controller hears of an event.
    fn prepare(&mut self, event: &Event) {
        match event {
            Event::Activated { .. } | Event::Deactivated { .. } => self.set_gate(),
            Event::LeaseFreed { lease } => {
                self.signs.remove(lease);
                for reply in self.fins.remove(lease).into_iter().flatten() {
                    let _ = reply.send(Ok(()));
                }
            }
            _ => {}
        }
    }

    /// A managed cgroup may swap while, and only while, a volume of ours is there to swap to.
    pub(super) fn set_gate(&self) {
        let Some(gate) = &self.parts.gate else { return };
        let done = match self.parts.borrower.is_active() {
            true => gate.open(),
            false => gate.shut(),
        };
        if let Err(error) = done {
            tracing::warn!("whether the cgroup may swap stays as it was: {error}");
        }
    }

    fn perform(&mut self, action: Action) {
        let (lender, borrower) = (self.parts.lender.clone(), self.parts.borrower.clone());
        match action {
            Action::Send { to, message } => self.say(to, message),
            Action::Activate(volume) => self.beside(Busy::Volume(volume.volume), move || {
                let id = volume.volume;
                match borrower.activate(&volume) {
                    Ok(()) => Event::Activated { volume: id },
                    Err(why) => Event::ActivationFailed { volume: id, why },
                }
            }),
            Action::Deactivate { volume } => {
                let fits = self.fits_without(volume);
                self.beside(Busy::Volume(volume), move || {
                    match fits.and_then(|()| borrower.deactivate(volume)) {
                        Ok(()) => Event::Deactivated { volume },
                        Err(why) => Event::DeactivationFailed { volume, why },
                    }
                });
            }
            Action::Evacuate { volume, lease, onto } => self.beside(Busy::Lease(lease), move || {
                let (unused, moved) = borrower.evacuate(volume, lease, &onto);
                match moved {
                    Ok(()) => Event::Evacuated { lease, unused },
                    Err(why) => Event::EvacuationFailed { lease, unused, why },
                }
            }),
            Action::OpenLease(record) => self.beside(Busy::Lease(record.lease), move || {
                let lease = record.lease;
                match lender.open_lease(&record) {
                    Ok(uris) => Event::LeaseOpened { lease, uris },
                    Err(why) => Event::LeaseFailed { lease, why },
                }
            }),
            Action::FreeLease { lease } => self.beside(Busy::Lease(lease), move || {
                lender.free_lease(lease);
                Event::LeaseFreed { lease }
            }),
        }
    }

    /// Whether what is swapped to a volume has room in memory. To be asked before swap goes off: the kernel would make room
    /// in a cgroup by killing its programs.
    fn fits_without(&self, volume: VolumeId) -> Result<(), String> {
        if self.parts.borrower.dead().contains(&volume) {
            // What it held is lost.
            return Ok(());
        }
        let reading = self.parts.source.read().map_err(|error| error.to_string())?;
        // What is swapped there may belong to others, who have their own memory for it.
        let back = self.parts.borrower.comes_back(volume)?.min(reading.swap_used);
        let free = reading.total.saturating_sub(reading.used);
        let keep = reading.total.scaled(KEPT_FREE);
        if back == Bytes::ZERO || back.saturating_add(keep) <= free {
            return Ok(());
        }
        Err(format!(
            "{back} are swapped out to volume {volume} and do not fit into memory: {free} of {} are free",
            reading.total
        ))
    }

    /// Runs `work` on a thread of its own, unless something is being done to the same thing already.
    fn beside(&mut self, busy: Busy, work: impl FnOnce() -> Event + Send + 'static) {
        if !self.busy.insert(busy.clone()) {
            return;
        }
        let outcomes = self.outcomes.clone();
        tokio::task::spawn_blocking(move || {
            // Nobody waits for it when the agent is ending.
            let _ = outcomes.send(Outcome::Done(busy, Some(work())));
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
                Ok(()) => Some(Event::Delivered { to, message }),
                Err(why) => {
                    tracing::debug!(
                        "{message:?} did not reach {to} and will be sent again if it still matters: {why}"
                    );
                    None
                }
            };
            outcomes.send(Outcome::Done(busy, event))
        });
    }
}
