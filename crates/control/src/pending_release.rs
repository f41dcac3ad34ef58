//! The `mem_bor_fin`s in flight, and their retries.

use std::collections::BTreeMap;
use std::time::Duration;

use aquifer_page::{HostName, LeaseId};

use crate::step_context::StepContext;
use crate::{Message, What};

/// Leases given back but not yet confirmed by their lenders. The controller repeats `mem_bor_fin`
/// until the lender confirms it.
///
/// The controller drops a fin that stays unconfirmed for the whole grace. A lender that heard none
/// of the repeats has not heard of the lease for the whole grace either, and frees it. A lender
/// that returns later asks by `mem_bor_ack`, and gets a new fin.
#[derive(Clone, Debug, Default)]
pub(crate) struct PendingReleases(BTreeMap<(HostName, LeaseId), PendingRelease>);

#[derive(Clone, Debug)]
struct PendingRelease {
    generation: u32,
    since: Duration,
    sent: Duration,
}

impl PendingReleases {
    /// Sends `mem_bor_fin`, and repeats it until the lender confirms it. If it is pending already,
    /// sends it at once again.
    pub(crate) fn add(
        &mut self,
        lender: &HostName,
        lease: LeaseId,
        generation: u32,
        ctx: &mut StepContext<'_>,
    ) {
        let now = ctx.now();
        let fin = self.0.entry((lender.clone(), lease)).or_insert_with(|| {
            ctx.decide(What::Finishes { lender: lender.clone(), lease });
            PendingRelease { generation, since: now, sent: now }
        });
        fin.generation = fin.generation.max(generation);
        fin.sent = now;
        ctx.send(lender, Message::MemBorFin { lease, generation: fin.generation });
    }

    /// Returns whether this fin is still unconfirmed.
    pub(crate) fn contains(&self, lender: &HostName, lease: LeaseId) -> bool {
        self.0.contains_key(&(lender.clone(), lease))
    }

    /// Removes the fin that the lender has confirmed.
    pub(crate) fn delivered(&mut self, lender: &HostName, lease: LeaseId) {
        self.0.remove(&(lender.clone(), lease));
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn tick(&mut self, ctx: &mut StepContext<'_>) {
        self.0.retain(|(lender, lease), fin| {
            if ctx.passed(ctx.config().grace, fin.since) {
                ctx.decide(What::FinDropped { lender: lender.clone(), lease: *lease });
                return false;
            }
            if ctx.passed(ctx.config().resend, fin.sent) {
                fin.sent = ctx.now();
                ctx.send(lender, Message::MemBorFin { lease: *lease, generation: fin.generation });
            }
            true
        });
    }
}
