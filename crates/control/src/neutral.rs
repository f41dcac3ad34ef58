//! The Neutral role's part of Algorithm 2.

use crate::borrower::Borrower;
use crate::step_context::StepContext;
use crate::{Cause, What};

/// Runs Algorithm 2 for a monitoring period (lines 1, 4 and 5): an overloaded host asks for memory.
///
/// The lines that answer messages are with their state: 2-3 and 9-13 in `LenderRole::requested`,
/// 6-8 in `Borrower::acknowledged`. `lends` says whether a lease is being set up or taken down. A
/// request would then make both edges of Fig. 3 race.
pub(crate) fn tick(borrower: &mut Borrower, lends: bool, ctx: &mut StepContext<'_>) {
    if lends || !ctx.wants_to_swap() || !borrower.may_start(ctx) {
        return;
    }
    let (group, bytes) = (ctx.config().group.clone(), ctx.config().request);
    if let Err(refusal) = borrower.borrow(Cause::Overload, bytes, group, ctx) {
        borrower.pause(ctx.config().cooldown, ctx);
        ctx.decide(What::BorrowRefused { bytes, cause: Cause::Overload, refusal });
    }
}
