//! The Neutral role's part of Algorithm 2.

use crate::borrower::Borrower;
use crate::turn::Turn;
use crate::{Cause, What};

/// Runs Algorithm 2 for a monitoring period (lines 1, 4 and 5): an overloaded host asks for memory.
///
/// The lines that answer messages are with their state: 2-3 and 9-13 in `Lender::requested`, 6-8 in
/// `Borrower::acknowledged`. `lends` says whether a lease is being set up or taken down. A request
/// would then make both edges of Fig. 3 race.
pub(crate) fn tick(borrower: &mut Borrower, lends: bool, turn: &mut Turn<'_>) {
    if lends || !turn.memory().overloaded(turn.config()) || !borrower.may_start(turn) {
        return;
    }
    let (group, bytes) = (turn.config().group.clone(), turn.config().request);
    if let Err(refusal) = borrower.borrow(Cause::Overload, bytes, group, turn) {
        borrower.pause(turn.config().cooldown, turn);
        turn.decide(What::BorrowRefused { bytes, refusal });
    }
}
