//! The order to leave the cluster.

use super::orders::failed;
use super::{Answer, Node, Problem, Ticket};

impl Node {
    /// Leaves the cluster, unless other hosts have pages here or this host has pages there: they
    /// would be lost. From then on this host neither lends nor borrows.
    pub(super) fn leave(&mut self, ticket: Ticket) {
        let answer = self.tie().unwrap_or_else(|| {
            self.belonging.has_left = true;
            self.controller.retire();
            Answer::Left
        });
        self.answer(ticket, answer);
    }

    /// Returns what keeps this host in its cluster.
    fn tie(&self) -> Option<Answer> {
        let controller = &self.controller;
        let (lent, volumes) = (controller.lent().len(), controller.volumes());
        let (swap, regions): (Vec<_>, Vec<_>) =
            volumes.into_iter().partition(|volume| volume.owner.is_swap());
        let passing = |error: String, help: &str| {
            Some(Answer::Tied(Problem { error, help: Some(help.to_owned()) }))
        };
        if lent + swap.len() > 0 {
            let error = format!("this host lends {lent} leases and borrows {} volumes", swap.len());
            return Some(failed(
                error,
                Some("run 'aquifer host drain' and 'aquifer host return' first"),
            ));
        }
        if let [region, ..] = &regions[..]
            && let Some(name) = region.owner.region()
        {
            let count = regions.len();
            let error = format!("{count} regions hold memory of other hosts, such as {name}");
            return passing(error, "run 'aquifer region rm', or 'aquifer vm stop' for a VM, first");
        }
        let help = "wait until 'aquifer status' shows that it is done";
        if controller.is_asking()
            || controller.pending_releases() > 0
            || self.orders.is_borrowing()
            || !self.orders.requests.is_empty()
            || self.caches.is_borrowing()
        {
            let error = "this host is about to borrow or to return memory".to_owned();
            return passing(error, help);
        }
        // The VM's memory may be at lenders.
        (controller.expects() || !self.own.claims.is_empty())
            .then(|| "a VM or a region is about to begin on this host".to_owned())
            .and_then(|error| passing(error, help))
    }
}
