//! A round of requests: the borrower asks one lender after the other.

use std::time::Duration;

use aquifer_page::{Bytes, Group, HostName, LeaseId, VolumeId};
use serde::Serialize;

use crate::placement::{in_whole_extents, whole_extents};
use crate::step_context::StepContext;
use crate::{BorrowedLease, Candidates, Cause, Message, Offer, Owner, Reason, RequestId, What};

/// The purpose of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A new volume for swap.
    Volume(Cause),
    /// The volume of a region, for which at least this much is of use.
    Region { volume: VolumeId, least: Bytes },
    /// Room for the pages of a recalled lease.
    Replace { volume: VolumeId, lease: LeaseId },
    /// A second copy of a lease.
    Copy { volume: VolumeId, of: LeaseId, goes_first: bool },
}

impl Purpose {
    pub(crate) fn cause(self) -> Option<Cause> {
        match self {
            Self::Volume(cause) => Some(cause),
            Self::Region { .. } => Some(Cause::ByHand),
            Self::Replace { .. } | Self::Copy { .. } => None,
        }
    }
}

/// The request in flight.
#[derive(Clone, Debug)]
struct Ask {
    request: RequestId,
    lender: HostName,
    bytes: Bytes,
    since: Duration,
    sent: Duration,
}

/// The request in flight, for the status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AskingStatus {
    /// The lender that has the request.
    pub lender: HostName,
    /// The bytes of this request.
    pub bytes: Bytes,
    /// The bytes wanted in all.
    pub wanted: Bytes,
    /// The bytes that other lenders have given already.
    pub got: Bytes,
}

/// A round: asks one lender after the other, largest spare first, until there is enough or no
/// lender is left.
///
/// A round asks one lender at a time, because otherwise all lenders would set room aside for a need
/// that one can meet. Between steps, a round always has a request in flight.
#[derive(Clone, Debug)]
pub(crate) struct Round {
    pub(crate) purpose: Purpose,
    pub(crate) owner: Owner,
    pub(crate) group: Group,
    pub(crate) wanted: Bytes,
    pub(crate) got: Vec<BorrowedLease>,
    candidates: Candidates,
    ask: Option<Ask>,
    /// A lender rejected because it was asking too, and its name sorts before this host's.
    yields: bool,
}

/// The state of the request in flight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// The request is still waiting.
    Goes,
    /// The request timed out: ask the next lender, and do not ask this one for a while.
    Over(HostName),
}

impl Round {
    pub(crate) fn new(
        purpose: Purpose,
        owner: Owner,
        group: Group,
        wanted: Bytes,
        candidates: Candidates,
    ) -> Self {
        let got = Vec::new();
        Self { purpose, owner, group, wanted, got, candidates, ask: None, yields: false }
    }

    pub(crate) fn got_bytes(&self) -> Bytes {
        self.got.iter().map(|lease| lease.bytes).sum()
    }

    /// Sends the next request. Returns false if there is enough, or no lender is left.
    pub(crate) fn ask_next(&mut self, ctx: &mut StepContext<'_>) -> bool {
        let missing = self.wanted.saturating_sub(self.got_bytes());
        if missing == Bytes::ZERO {
            return false;
        }
        let Some((lender, bytes)) = self.candidates.take(missing) else { return false };
        let (since, sent) = (ctx.now(), ctx.now());
        let ask = Ask { request: ctx.ids.request(), lender, bytes, since, sent };
        let (lender, cause, owner) = (ask.lender.clone(), self.purpose.cause(), self.owner.clone());
        let (copy_of, instead_of) = match self.purpose {
            Purpose::Copy { of, .. } => (Some(of), None),
            Purpose::Replace { lease, .. } => (None, Some(lease)),
            _ => (None, None),
        };
        ctx.decide(What::Asks { lender, bytes, cause, owner, copy_of, instead_of });
        ctx.send(&ask.lender, self.message(&ask));
        self.ask = Some(ask);
        true
    }

    fn message(&self, ask: &Ask) -> Message {
        let (owner, group) = (self.owner.clone(), self.group.clone());
        let goes_first = matches!(self.purpose, Purpose::Copy { goes_first: true, .. });
        Message::MemBorReq { request: ask.request, bytes: ask.bytes, owner, group, goes_first }
    }

    /// Returns whether this is the request in flight.
    pub(crate) fn awaits(&self, from: &HostName, request: RequestId) -> bool {
        self.ask.as_ref().is_some_and(|ask| ask.lender == *from && ask.request == request)
    }

    /// Returns whether a lease of this size may answer the request in flight: whole extents, and at
    /// most the requested size.
    pub(crate) fn fits(&self, bytes: Bytes) -> bool {
        in_whole_extents(bytes) && self.ask.as_ref().is_some_and(|ask| bytes <= ask.bytes)
    }

    /// Returns whether a request to this lender is in flight.
    pub(crate) fn asks(&self, lender: &HostName) -> bool {
        self.ask.as_ref().is_some_and(|ask| ask.lender == *lender)
    }

    /// Takes the lease that answers the request in flight.
    pub(crate) fn acknowledged(&mut self, lease: BorrowedLease, ctx: &mut StepContext<'_>) {
        self.ask = None;
        let (lender, id, bytes) = (lease.lender.clone(), lease.lease, lease.bytes);
        self.got.push(lease);
        let missing = self.wanted.saturating_sub(self.got_bytes());
        ctx.decide(What::Got { lender, lease: id, bytes, missing });
    }

    /// Ends the request in flight, which the lender rejected. Returns whether to skip this lender
    /// for a while. If not, the lender has less room than expected, and gets another request for
    /// that room.
    pub(crate) fn rejected(
        &mut self,
        spare: Bytes,
        reason: Reason,
        ctx: &mut StepContext<'_>,
    ) -> bool {
        let Some(Ask { lender, bytes, .. }) = self.ask.take() else { return false };
        ctx.decide(What::Rejected { lender: lender.clone(), bytes, spare, reason });
        // Two hosts that ask each other must not do so again at the same moment.
        self.yields |= reason == Reason::Asking && lender < ctx.facts.host;
        if reason == Reason::NoRoom && whole_extents(spare) < bytes {
            let offer = Offer::new(lender, spare);
            let asked_again = offer.spare >= Bytes(aquifer_page::EXTENT_SIZE);
            self.candidates.add(offer);
            return !asked_again;
        }
        true
    }

    /// Ends the request in flight, which the lender refused to accept.
    pub(crate) fn refused(&mut self, why: String, ctx: &mut StepContext<'_>) {
        if let Some(Ask { lender, bytes, .. }) = self.ask.take() {
            ctx.decide(What::Refused { lender, bytes, why });
        }
    }

    /// Forgets the request in flight, so that a late ack is answered with `mem_bor_fin`.
    pub(crate) fn forget(&mut self) {
        self.ask = None;
    }

    /// Sends the request again, or ends it after its timeout.
    pub(crate) fn tick(&mut self, ctx: &mut StepContext<'_>) -> Wait {
        let Some(ask) = &mut self.ask else { return Wait::Goes };
        if ctx.passed(ctx.config().give_up, ask.since) {
            let lender = ask.lender.clone();
            let waited = ctx.now().saturating_sub(ask.since);
            ctx.decide(What::GivesUp { lender: lender.clone(), bytes: ask.bytes, waited });
            self.ask = None;
            return Wait::Over(lender);
        }
        if ctx.passed(ctx.config().resend, ask.sent) {
            ask.sent = ctx.now();
            let ask = ask.clone();
            ctx.send(&ask.lender, self.message(&ask));
        }
        Wait::Goes
    }

    /// Returns how long to wait after a round that brought nothing. Of two hosts that ask each
    /// other, the one with the first name asks again first, and finds the other idle.
    pub(crate) fn pause(&self, cooldown: Duration) -> Duration {
        if self.yields { cooldown * 2 } else { cooldown }
    }

    pub(crate) fn status(&self) -> Option<AskingStatus> {
        let ask = self.ask.as_ref()?;
        let (lender, bytes) = (ask.lender.clone(), ask.bytes);
        Some(AskingStatus { lender, bytes, wanted: self.wanted, got: self.got_bytes() })
    }
}
