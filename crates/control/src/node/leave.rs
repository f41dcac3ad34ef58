//! The order to leave the cluster.

use super::orders::failed;
use super::{Answer, Node, Ticket};

impl Node {
    /// Leaves the cluster, unless other hosts have pages here or this host has pages there: they
    /// would be lost. From then on this host neither lends nor borrows.
    pub(super) fn leave(&mut self, ticket: Ticket) {
        let controller = &self.controller;
        let (lent, volumes) = (controller.lent().len(), controller.volumes());
        let (swap, regions): (Vec<_>, Vec<_>) =
            volumes.into_iter().partition(|volume| volume.owner.is_swap());
        let asks =
            controller.is_asking() || self.orders.is_borrowing() || !self.requests.is_empty();
        let answer = if lent + swap.len() > 0 {
            let error = format!("this host lends {lent} leases and borrows {} volumes", swap.len());
            failed(error, Some("run 'aquifer host drain' and 'aquifer host return' first"))
        } else if let [region, ..] = &regions[..]
            && let Some(name) = region.owner.region()
        {
            let count = regions.len();
            let error = format!("{count} regions hold memory of other hosts, such as {name}");
            failed(error, Some("run 'aquifer region rm', or 'aquifer vm stop' for a VM, first"))
        } else if asks || controller.pending_releases() > 0 {
            let error = "this host is about to borrow or to return memory".to_owned();
            failed(error, Some("wait until 'aquifer status' shows that it is done"))
        } else {
            self.has_left = true;
            self.controller.retire();
            Answer::Left
        };
        self.answer(ticket, answer);
    }
}
