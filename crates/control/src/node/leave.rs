//! The order to leave the cluster.

use std::time::Duration;

use super::orders::failed;
use super::{Answer, Node, Ticket};

/// How long the order waits for memory that this host is about to borrow or to return.
const SETTLING: Duration = Duration::from_secs(10);

/// What keeps a host in its cluster.
#[derive(Debug)]
struct Tie {
    refusal: Answer,
    /// Whether it may end by itself within moments.
    passes: bool,
}

impl Node {
    /// Leaves the cluster, unless other hosts have pages here or this host has pages there: they
    /// would be lost. From then on this host neither lends nor borrows.
    pub(super) fn leave(&mut self, ticket: Ticket) {
        if let Some((former, _)) = self.belonging.leaving.replace((ticket, self.now)) {
            self.answer(former, failed("the order came once more".to_owned(), None));
        }
    }

    /// Carries out the order to leave, if there is one, as soon as nothing in progress prevents it.
    pub(super) fn leave_if_settled(&mut self) {
        let Some((ticket, since)) = self.belonging.leaving else { return };
        let answer = match self.tie() {
            Some(tie) if tie.passes && !self.passed(SETTLING, since) => return,
            Some(tie) => tie.refusal,
            None => {
                self.belonging.has_left = true;
                self.controller.retire();
                Answer::Left
            }
        };
        self.belonging.leaving = None;
        self.answer(ticket, answer);
    }

    fn tie(&self) -> Option<Tie> {
        let controller = &self.controller;
        let (lent, volumes) = (controller.lent().len(), controller.volumes());
        let (swap, regions): (Vec<_>, Vec<_>) =
            volumes.into_iter().partition(|volume| volume.owner.is_swap());
        if lent + swap.len() > 0 {
            let error = format!("this host lends {lent} leases and borrows {} volumes", swap.len());
            let help = "run 'aquifer host drain' and 'aquifer host return' first";
            return Some(Tie { refusal: failed(error, Some(help)), passes: false });
        }
        if let [region, ..] = &regions[..]
            && let Some(name) = region.owner.region()
        {
            let count = regions.len();
            let error = format!("{count} regions hold memory of other hosts, such as {name}");
            let help = "run 'aquifer region rm', or 'aquifer vm stop' for a VM, first";
            // A region may have just ended: a period notices that.
            return Some(Tie { refusal: failed(error, Some(help)), passes: true });
        }
        let asks = controller.is_asking()
            || self.orders.is_borrowing()
            || !self.orders.requests.is_empty();
        (asks || controller.pending_releases() > 0).then(|| {
            let error = "this host is about to borrow or to return memory".to_owned();
            let help = "wait until 'aquifer status' shows that it is done";
            Tie { refusal: failed(error, Some(help)), passes: true }
        })
    }
}
