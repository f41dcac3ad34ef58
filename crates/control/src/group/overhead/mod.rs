//! What one group does not need is lent to another, which pays for the lender's scanner: demand-based overhead migration
//! (GRP-M; Groups, section 7.1), between groups of one host that have agreed to it.
//!
//! Each period, [`Ledger::step`] takes a [`Reading`] of each group, and returns a [`Plan`]: the [`Change`]s of what is lent,
//! and an [`Account`] for each group: its [`Surplus`](super::Surplus) for the period, and who pays for its scanner.
//!
//! # Lending
//! A group of which no VM swaps, and has not for [`Config::idle_periods`], lends what its surplus has beyond what its VMs
//! hold. A group whose VMs swap, and which has nothing left to give them, borrows what it lacks for their next steps:
//! who swaps most first, from whom it has borrowed already, then from who has most. Neither does the other at the same
//! time: a group that borrows lends nothing, and one that has lent and is short itself gets back what it lent.
//!
//! # Giving back
//! A loan is **recalled** when its owner needs it: all when one of its VMs swaps or consent is withdrawn, and as much as
//! is missing when the owner's surplus falls. From then on it is the owner's: the borrower's surplus is less by it, so
//! what its VMs hold of it is a deficit, which they give back first of all ([`reprovision`](super::reprovision)). Until
//! they have, it is **owed**, and awaited by the owner, whose VMs are not touched for it. What they do not hold, and what
//! the borrower's own surplus or another lender covers, comes at once. A borrower that does not need what it has borrowed
//! (no VM swaps, and none holds it) returns it unasked.
//!
//! # Who pays
//! "The memory deduplication overhead starts to be accounted to the demanding group" and is "migrated back to the idling
//! group when there is no more idle surplus memory": while something is lent, the lender's scanner is charged to the
//! borrower that has most of it (a scanner is in one CPU account at a time), and its rate follows CPU and swap of that
//! group (section 7.2).

mod account;
mod change;
mod config;
mod debts;
mod ledger;
mod recall;

pub use account::{Account, Plan};
pub use change::{Change, Loan, Why};
pub use config::{Config, Reading};
pub use ledger::Ledger;
