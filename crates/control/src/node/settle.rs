//! The ends of actions and of this host's own messages.

use aquifer_page::HostName;

use super::{Answer, Node, Output, Said, Work};
use crate::{Event, Message};

impl Node {
    /// Handles the end of a message to a peer.
    pub(super) fn said(&mut self, to: HostName, message: Message, end: Said) {
        if let (Message::MemLenFin { lease, .. }, Said::Taken(failed)) = (&message, &end) {
            match failed {
                Some(failed) => drop(self.lending.told.insert(*lease, failed.clone())),
                None => drop(self.lending.told.remove(lease)),
            }
        }
        let work = Work::Message(to.clone(), message.clone());
        let event = match end {
            Said::Taken(_) => Some(Event::Delivered { to, message }),
            Said::Refused(why) => Some(Event::Refused { by: to, message, why }),
            Said::Lost => None,
        };
        self.done(&work, event);
    }

    /// Handles the end of an action.
    pub(super) fn done(&mut self, work: &Work, event: Option<Event>) {
        self.work.remove(work);
        let Some(event) = event else { return };
        self.prepare(&event);
        self.step(event.clone());
        self.outputs.extend(self.orders.note_event(&event, self.now));
    }

    /// Does the node's part before the controller takes an event.
    fn prepare(&mut self, event: &Event) {
        match event {
            Event::Activated { volume } => {
                self.loan_arrived(*volume);
                self.own.caches.leases_changed = Some(self.now);
                // The lenders learn at once how long this host's I/O waits for them.
                self.borrowing.renewed = None;
                self.outputs.push(Output::SetSwapGate);
            }
            Event::Extended { volume, unused } => {
                self.own.caches.leases_changed = Some(self.now);
                // The controller tells of leases that the region could not take.
                if unused.is_empty() {
                    self.loan_arrived(*volume);
                }
                self.borrowing.renewed = None;
            }
            Event::Deactivated { .. } => self.outputs.push(Output::SetSwapGate),
            Event::Evacuated { lease, .. } => drop(self.borrowing.failures.remove(lease)),
            Event::EvacuationFailed { lease, why, .. } => {
                self.borrowing.failures.insert(*lease, why.clone());
            }
            Event::LeaseRecorded(lent) => self.answer_permits(lent),
            Event::RecordFailed { lease, why } => self.refuse_permits(*lease, why),
            Event::LeaseFreed { lease } => {
                self.refuse_permits(*lease, "its memory is free again");
                self.lending.signs.remove(lease);
                self.lending.missed.remove(lease);
                self.lending.told.remove(lease);
                for ticket in self.lending.fins.remove(lease).into_iter().flatten() {
                    self.answer(ticket, Answer::Heard(None));
                }
            }
            _ => {}
        }
    }
}
