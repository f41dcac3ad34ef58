//! Leases that move with their region: from the host that holds them to the one that the region
//! moves to.
//!
//! The borrower may be moving a region. The lender then also lets the destinations use the lease.
//! These hosts settle between them which of them has the region. A destination that has it says so.
//! The lender frees the lease once all of them have denied it. Each change of hands begins a
//! generation, so a late message of a former holder has no effect.

use std::time::Duration;

use aquifer_page::{HostName, LeaseId, VolumeId};

use crate::borrower::{Borrower, VolumeState};
use crate::lender::LenderRole;
use crate::loan::{Answers, Loan, LoanState};
use crate::step_context::StepContext;
use crate::{Action, LentLease, LiveVolume, Message, What};

impl LenderRole {
    /// Lets `to` use a lease as well, as its borrower may be moving the region there. Only the
    /// present borrower can order this, for one host at a time.
    pub(crate) fn permit(
        &mut self,
        from: &HostName,
        lease: LeaseId,
        generation: u32,
        to: HostName,
        ctx: &mut StepContext<'_>,
    ) {
        self.taken(from, lease, generation, ctx);
        let Some(loan) = self.loans.get_mut(&lease) else { return };
        if !loan.can_move(from, generation) {
            return ctx.decide(What::Stranger { from: from.clone(), lease });
        }
        ctx.decide(What::Permits { borrower: from.clone(), lease, to: to.clone() });
        loan.lease.next.insert(to);
        loan.order_record(ctx);
    }

    /// Makes a host the borrower if the lease may have moved there.
    pub(crate) fn taken(
        &mut self,
        by: &HostName,
        lease: LeaseId,
        generation: u32,
        ctx: &mut StepContext<'_>,
    ) {
        if let Some(loan) = self.loans.get_mut(&lease)
            && loan.is_next(by, generation)
        {
            loan.pass_on(by.clone(), ctx);
        }
    }

    /// Handles `mem_bor_fin` (Algorithm 4 lines 5-7): a host does not hold the lease. If the
    /// borrower may have moved its region, this host then asks the destinations. The lease is free
    /// once all have denied it.
    pub(crate) fn denied(
        &mut self,
        by: &HostName,
        lease: LeaseId,
        generation: u32,
        ctx: &mut StepContext<'_>,
    ) {
        let Some(loan) = self.loans.get_mut(&lease) else { return };
        let is_next = loan.is_next(by, generation);
        let is_borrower = loan.lease.borrower == *by && loan.lease.generation == generation;
        if !loan.exists() || !(is_next || is_borrower) {
            return ctx.decide(What::Stranger { from: by.clone(), lease });
        }
        match is_borrower {
            true if loan.state == LoanState::Freeing => return,
            true => (loan.left, loan.seen) = (true, ctx.now()),
            // Before the borrower has left, the region may still come.
            false if !loan.left => return loan.answers.denied(by),
            false => _ = loan.lease.next.remove(by),
        }
        if loan.lease.next.is_empty() {
            ctx.decide(What::Frees { borrower: by.clone(), lease, stored: loan.stored });
            loan.free(ctx);
        } else {
            loan.ask_next(ctx);
        }
    }

    /// Notes that the agent has written down which hosts may use a lease.
    pub(crate) fn recorded(&mut self, lease: &LentLease, ctx: &mut StepContext<'_>) {
        let Some(loan) = self.loans.get_mut(&lease.lease) else { return };
        match loan.lease == *lease {
            true => loan.unrecorded = None,
            false => loan.order_record(ctx),
        }
    }
}

impl Loan {
    fn can_move(&self, from: &HostName, generation: u32) -> bool {
        let LentLease { borrower, owner, generation: present, .. } = &self.lease;
        let is_held = !matches!(self.state, LoanState::Opening | LoanState::Freeing);
        is_held && !owner.is_swap() && (borrower, *present) == (from, generation)
    }

    /// Returns whether the lease is to move to this host, as this generation.
    pub(crate) fn is_next(&self, host: &HostName, generation: u32) -> bool {
        self.lease.next.contains(host) && generation == self.lease.generation + 1
    }

    /// Makes `next` the borrower. A recall goes on there, unless only the former borrower was its
    /// reason.
    fn pass_on(&mut self, next: HostName, ctx: &mut StepContext<'_>) {
        let LentLease { lease, borrower, generation, .. } = self.lease.clone();
        ctx.decide(What::PassesOn { from: borrower, to: next.clone(), lease });
        self.lease.borrower = next;
        self.lease.generation = generation + 1;
        self.lease.next.clear();
        (self.left, self.sent, self.answers) = (false, Duration::ZERO, Answers::default());
        if std::mem::take(&mut self.parted) && self.state == LoanState::Recalled {
            (self.state, self.recalled) = (LoanState::Held, None);
        }
        self.seen(ctx.now());
        self.order_record(ctx);
    }

    /// Asks the hosts to which the lease may have moved whether they hold it.
    pub(crate) fn ask_next(&mut self, ctx: &mut StepContext<'_>) {
        (self.sent, self.answers) = (ctx.now(), Answers::default());
        let LentLease { lease, bytes, request, generation, .. } = self.lease;
        let (uris, generation) = (self.uris.clone(), generation + 1);
        let question = Message::MemBorAck { request, lease, bytes, uris, generation };
        self.lease.next.iter().for_each(|host| ctx.send(host, question.clone()));
    }

    pub(crate) fn order_record(&mut self, ctx: &mut StepContext<'_>) {
        self.unrecorded = Some(ctx.now());
        ctx.act(Action::RecordLease(self.lease.clone()));
    }
}

impl Borrower {
    /// Forgets a region that is on another host now. That host holds the region's leases.
    pub(crate) fn moved(&mut self, id: VolumeId, to: HostName, ctx: &mut StepContext<'_>) {
        let Some(volume) = self.volumes.get(&id) else { return };
        let Some(region) = volume.owner.region().cloned() else { return };
        self.abandon_replacement(id, ctx);
        self.give_back_copies(id, ctx);
        let before = self.holdings.len();
        self.holdings.retain(|_, holding| holding.volume != id);
        self.volumes.remove(&id);
        let leases = before - self.holdings.len();
        ctx.decide(What::MovedAway { region, volume: id, to, leases });
    }

    /// Takes over the leases of a region that has come to this host. If it has come back before
    /// this host noticed that it was away, its leases are other ones now.
    pub(crate) fn arrived(&mut self, live: &LiveVolume, ctx: &mut StepContext<'_>) {
        let Some(region) = live.owner.region().cloned() else { return };
        self.expected.remove(&live.volume);
        if self.volumes.remove(&live.volume).is_some() {
            self.abandon_replacement(live.volume, ctx);
            self.give_back_copies(live.volume, ctx);
            self.holdings.retain(|_, holding| holding.volume != live.volume);
        }
        self.add_volume(live, VolumeState::Active);
        let (volume, leases) = (live.volume, live.leases.len());
        ctx.decide(What::Arrived { region, volume, leases });
    }
}
