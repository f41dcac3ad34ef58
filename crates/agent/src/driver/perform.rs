//! The execution of the node's outputs.

use std::collections::BTreeSet;

use aquifer_api::message::{MovedLease, Renew};
use aquifer_control::node::{Input, Notice, Output, Said, Work};
use aquifer_control::{Action, Event, Memory, Message};
use aquifer_page::{HostName, VolumeId};

use super::{Driver, readings};
use crate::borrower::Leaving;
use crate::peers::SayError;

impl Driver {
    pub(super) fn perform(&mut self, output: Output) {
        match output {
            Output::Begin(work, action) => self.begin(work, action),
            Output::AskOffers => self.ask_offers(),
            Output::Renew { only } => self.renew(only.as_ref()),
            Output::LookAtVolumes => self.look_at_volumes(),
            Output::LookAtVms => self.look_at_vms(),
            Output::MoveVm { vm, avoid, below } => self.move_vm(vm, avoid, below),
            Output::SetCache { region, cache } => self.set_cache(region, cache),
            Output::CancelMove => self.parts.vms.cancel_move(),
            Output::SetSwapGate => self.set_gate(),
            Output::Answer(ticket, answer) => self.answer(ticket, answer),
            Output::Decision { role, what, about } => {
                self.parts.journal.decided(role, what, about);
            }
            Output::RoleChanged { from, to } => self.parts.journal.role_changed(from, to),
            Output::Notice(Notice { kind, who, what }) => {
                self.parts.events.note(kind, who, what);
            }
            Output::Warning(what) => tracing::warn!("{what}"),
        }
    }

    fn begin(&mut self, work: Work, action: Action) {
        let (lender, borrower) = (self.parts.lender.clone(), self.parts.borrower.clone());
        match action {
            Action::Send { to, message } => self.say(to, message),
            Action::Activate(live) => {
                let (volume, priority) = (live.volume, self.node.priority_of(live.volume));
                borrower.expect(&live);
                self.beside(work, move || match borrower.activate(&live, priority) {
                    Ok(()) => Some(Event::Activated { volume }),
                    Err(why) => Some(Event::ActivationFailed { volume, why }),
                });
            }
            Action::Deactivate { volume } => {
                let fits = self.fits_without(volume);
                self.beside(work, move || match fits.and_then(|()| borrower.deactivate(volume)) {
                    Ok(()) => Some(Event::Deactivated { volume }),
                    Err(why) => Some(Event::DeactivationFailed { volume, why }),
                });
            }
            Action::Extend(live) => self.beside(work, move || {
                let unused = borrower.extend(&live);
                Some(Event::Extended { volume: live.volume, unused })
            }),
            Action::Copy { volume, of, onto } => self.beside(work, move || {
                let failed = borrower.add_copy(volume, of, &onto).err();
                Some(Event::Copied { lease: onto.lease, failed })
            }),
            Action::Evacuate { volume, lease, onto, spills } => {
                let leaving = Leaving { lease, spills, rotates: self.node.rotates(lease) };
                self.beside(work, move || {
                    let (unused, moved) = borrower.evacuate(volume, leaving, &onto);
                    match moved {
                        Ok(()) => Some(Event::Evacuated { lease, unused }),
                        Err(why) => Some(Event::EvacuationFailed { lease, unused, why }),
                    }
                });
            }
            Action::OpenLease(record) => self.beside(work, move || {
                let lease = record.lease;
                match lender.open_lease(&record) {
                    Ok(uris) => Some(Event::LeaseOpened { lease, uris }),
                    Err(why) => Some(Event::LeaseFailed { lease, why }),
                }
            }),
            Action::RecordLease(lent) => self.beside(work, move || {
                let lease = lent.lease;
                Some(match lender.record_lease(&lent) {
                    Ok(()) => Event::LeaseRecorded(lent),
                    Err(why) => Event::RecordFailed { lease, why },
                })
            }),
            Action::FreeLease { lease } => self.beside(work, move || {
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

    /// Runs the action on a blocking thread.
    fn beside(&self, work: Work, run: impl FnOnce() -> Option<Event> + Send + 'static) {
        self.later(move || Input::Done { work, event: run() });
    }

    pub(super) fn later(&self, run: impl FnOnce() -> Input + Send + 'static) {
        let ends = self.ends.clone();
        // The send fails only while the agent ends.
        tokio::task::spawn_blocking(move || _ = ends.send(run()));
    }

    /// Reads what the node needs to decide whether a volume may leave.
    fn fits_without(&self, volume: VolumeId) -> Result<(), String> {
        if self.parts.borrower.dead().contains(&volume) {
            // The pages of a dead volume are lost.
            return Ok(());
        }
        let reading = self.parts.source.read().map_err(|error| error.to_string())?;
        let (total, used, swap_used) = (reading.total, reading.used, reading.swap_used);
        let back = self.parts.borrower.comes_back(&self.node.leaving_with(volume))?;
        self.node.fits_without(volume, back, &Memory { total, used, swap_used, pressure: false })
    }

    fn say(&self, to: HostName, message: Message) {
        let (peers, ends) = (self.parts.peers.clone(), self.ends.clone());
        tokio::spawn(async move {
            let end = match peers.say(&to, &message).await {
                Ok(failed) => Said::Taken(failed),
                Err(SayError::Refused(why)) => Said::Refused(why),
                Err(SayError::Lost(why)) => {
                    tracing::debug!("{message:?} did not reach {to}, and may be sent again: {why}");
                    Said::Lost
                }
            };
            ends.send(Input::Said { to, message, end })
        });
    }

    fn ask_offers(&self) {
        let (peers, lender) = (self.parts.peers.clone(), self.parts.lender.clone());
        let (ends, needed) = (self.ends.clone(), self.node.requested());
        tokio::spawn(async move {
            let lenders = peers.offers(needed).await;
            ends.send(Input::Offers { lenders, stored: lender.stored_by_lease() })
        });
    }

    fn renew(&self, only: Option<&BTreeSet<HostName>>) {
        let io_timeout_ms = u64::try_from(self.parts.config.borrow.io_timeout.as_millis()).ok();
        let generations = self.parts.borrower.generations();
        for (lender, leases) in self.parts.borrower.leases_by_lender() {
            if only.is_some_and(|only| !only.contains(&lender)) {
                continue;
            }
            let moved = leases.iter().filter_map(|lease| {
                let (&lease, &generation) = generations.get_key_value(lease)?;
                Some(MovedLease { lease, generation })
            });
            let moved = moved.collect();
            let (peers, ends) = (self.parts.peers.clone(), self.ends.clone());
            tokio::spawn(async move {
                let lost = peers.renew(&lender, Renew { leases, moved, io_timeout_ms }).await;
                ends.send(Input::Renewed { lender, lost })
            });
        }
    }

    /// Looks at volumes and regions on a blocking thread, because each is another process.
    fn look_at_volumes(&mut self) {
        if self.node.controller().volumes().is_empty() {
            return self.input(Input::Volumes(Vec::new()));
        }
        let borrower = self.parts.borrower.clone();
        self.later(move || {
            let volumes = borrower.status().into_iter().map(|volume| {
                let takes_copies = borrower.takes_copies(volume.volume);
                readings::volume(volume, takes_copies)
            });
            let regions = borrower.regions().into_iter().map(readings::region);
            Input::Volumes(volumes.chain(regions).collect())
        });
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
}
