//! Requests for memory of VMs, regions and exports of this host.

use aquifer_api::Problem;
use aquifer_api::order::{Claim, ClaimPurpose};
use aquifer_control::ledger;
use aquifer_control::node::{Input, Threshold};
use aquifer_page::{Bytes, HostName};
use aquifer_vm::memory::Room;
use tokio::sync::oneshot::Sender;

use super::{Driver, Reply};

impl Driver {
    /// Passes a claim to the node, unless the ledger does not count what it is for.
    pub(super) fn claim(&mut self, order: Claim, reply: Sender<Result<(), Problem>>) {
        if !self.counts(&order) {
            // The requester may be gone; the failed send does not matter then.
            let _ = reply.send(Ok(()));
            return;
        }
        let ticket = self.replies.keep(Reply::Done(reply));
        let Claim { name, purpose, group, bytes, reserve, overcommit, .. } = order;
        let purpose = match purpose {
            ClaimPurpose::Vm => ledger::Purpose::Vm,
            ClaimPurpose::Cache => ledger::Purpose::Cache,
            ClaimPurpose::Export => ledger::Purpose::Export,
        };
        let claim = ledger::Claim { name, purpose, group, bytes, reserve };
        self.input(Input::Claim { claim, overcommit, ticket });
    }

    /// Passes the offer of a VM to the node. It claims nothing if the ledger does not count what
    /// this agent starts.
    pub(super) fn take_vm(
        &mut self,
        from: HostName,
        mut claim: ledger::Claim,
        below: Option<Threshold>,
        reply: Sender<Result<(), Problem>>,
    ) {
        if !self.parts.own.counts(std::process::id()) {
            claim.bytes = Bytes::ZERO;
        }
        let ticket = self.replies.keep(Reply::Done(reply));
        self.input(Input::TakeVm { from, claim, below, ticket });
    }

    /// Returns by how much VMs may grow; `None` if the ledger counts no VM.
    pub(super) fn room(&self) -> Option<Room> {
        let controller = self.node.controller();
        let counts = self.parts.own.latest().growing().next().is_some();
        counts.then(|| Room { free: controller.left(), recallable: controller.recallable() })
    }

    fn counts(&self, Claim { name, purpose, pid, .. }: &Claim) -> bool {
        let own = self.parts.own.latest();
        match (pid, purpose) {
            (Some(pid), _) => self.parts.own.counts(*pid),
            (None, ClaimPurpose::Vm) => own.growing().any(|(known, _)| known == name),
            (None, ClaimPurpose::Cache) => {
                own.regions.iter().any(|known| known.name == *name) || self.node.has_promised(name)
            }
            (None, ClaimPurpose::Export) => own.exports.iter().any(|known| known.name == *name),
        }
    }
}
