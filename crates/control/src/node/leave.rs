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
        let (swap, mut regions): (Vec<_>, Vec<_>) =
            volumes.into_iter().partition(|volume| volume.owner.is_swap());
        // All of a region may be in its spill file.
        regions.retain(|region| controller.borrowed().iter().any(|it| it.volume == region.volume));
        if lent + swap.len() > 0 {
            let error = format!("this host lends {lent} leases and borrows {} volumes", swap.len());
            let help = "run 'aquifer host drain' and 'aquifer host return' first";
            return Some(failed(error, Some(help)));
        }
        let moves = controller.is_asking()
            || controller.pending_releases() > 0
            || self.orders.is_borrowing()
            || !self.orders.requests.is_empty()
            || self.own.caches.is_borrowing();
        // The memory of what begins may be at lenders.
        let begins = controller.expects() || !self.own.claims.is_empty();
        let wait = "wait until 'aquifer status' shows that it is done";
        let (error, help) = if let Some(region) = regions.iter().find_map(|one| one.owner.region())
        {
            let error =
                format!("{} regions hold memory of other hosts, such as {region}", regions.len());
            (error, "run 'aquifer region rm', or 'aquifer vm stop' for a VM, first")
        } else if moves {
            ("this host is about to borrow or to return memory".to_owned(), wait)
        } else if begins {
            ("a VM or a region is about to begin on this host".to_owned(), wait)
        } else {
            return None;
        };
        Some(Answer::Tied(Problem { error, help: Some(help.to_owned()) }))
    }
}
