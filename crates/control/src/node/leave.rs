//! The order to leave the cluster.

use super::orders::failed;
use super::{Answer, Node, Ticket};

impl Node {
    /// Leaves the cluster, unless other hosts have pages here or this host has pages there: they
    /// would be lost. From then on this host neither lends nor borrows.
    pub(super) fn leave(&mut self, ticket: Ticket) {
        let controller = &self.controller;
        let (lent, volumes) = (controller.lent().len(), controller.volumes().len());
        let asks = controller.is_asking() || self.orders.is_borrowing();
        let answer = if lent + volumes > 0 {
            let error = format!("this host lends {lent} leases and borrows {volumes} volumes");
            failed(error, Some("run 'aquifer host drain' and 'aquifer host return' first"))
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
