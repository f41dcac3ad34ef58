//! Loans of idle savings from one group to another, which pays for the lender's scanner.
//!
//! The method is demand-based overhead migration (GRP-M; \[Kim14\] section 7.1), between groups of
//! one host that have agreed to it. Each period, [`Ledger::step`] takes a [`Reading`] of each
//! group, and returns a [`Plan`]. The plan has the [`Change`]s of the loans, and an [`Account`] for
//! each group: its [`Surplus`](super::Surplus) for the period, and the payer for its scanner.
//!
//! # Lending
//! A group lends the surplus that its VMs do not hold, if none of them has swapped for
//! [`Config::idle_periods`]. If a group's VMs swap and it has nothing left to give them, it borrows
//! the bytes for their next steps. The group that swaps most borrows first. A borrower turns to its
//! present lenders first, then from the lender with the most idle memory. No group lends and
//! borrows at the same time. A borrower lends nothing; a lender that is short itself gets its own
//! loans back.
//!
//! # Giving back
//! A loan is **recalled** when its owner needs it. The owner recalls all of it when one of its VMs
//! swaps or consent is withdrawn, and the missing part when the owner's surplus falls. From then on
//! the bytes are the owner's, and the borrower's surplus is less by them. Recalled bytes that the
//! borrower's VMs hold are therefore a deficit, which they give back first of all
//! ([`reprovision`](super::reprovision)). Until then these bytes are **owed**. The owner awaits
//! them, but takes nothing from its own VMs for them. Other recalled bytes come back at once: those
//! that the VMs do not hold, or that the borrower's other surplus or another lender covers. A
//! borrower returns idle loans unasked (no VM swaps, and none holds the bytes).
//!
//! # Payment
//! The "overhead starts to be accounted to the demanding group". The overhead is "migrated back to
//! the idling group when there is no more idle surplus memory". While a group lends, the borrower
//! with the largest loan pays for the lender's scanner. There is one payer, because a scanner is in
//! one CPU account at a time. The scan rate follows the CPU and swap figures of that borrower
//! (section 7.2).

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
