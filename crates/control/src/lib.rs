//! Decisions as pure state machines: no clock, no I/O.
//!
//! [`Controller`] is the controller of the paper (Sharing, Algorithms 1-4, eqs. 1 and 2, Figs. 3-5), for many borrowers
//! and many lenders. An agent feeds it [`Event`]s with the time at which they happened, carries out the [`Action`]s
//! that come back, and logs the [`Decision`]s, each of which explains itself with its numbers.
//!
//! [`balance`] is another machine, of one host by itself: it moves memory between the host's VMs. [`group`] has three more,
//! of what the VMs of one tenant on a host save by sharing pages. The rest of this page is about the controller.
//!
//! # What holds whatever the network does
//! Messages may be lost, doubled and reordered, and either agent may be restarted at any moment:
//! - **No direct step between Borrower and Lender.** Only the four edges of Fig. 3 are written down
//!   (`controller::next_role`), and a host grants nothing while it asks, nor asks while it lends.
//! - **A lender frees a lease only when its borrower said `mem_bor_fin`**, or gave no sign at all for
//!   [`Config::grace`]. A borrower says `mem_bor_fin` only for a lease that no volume of its uses.
//! - **No fin is lost, no lease leaks.** Each fin is repeated until the other side has it. `mem_bor_ack` doubles as
//!   the question "do you hold this lease?": the lender repeats it to a borrower that is silent, and a borrower that
//!   does not hold the lease answers `mem_bor_fin`. So whatever a crash forgot on one side is asked again by the other.
//! - **One lease a request**, however often the request arrives.
//!
//! # Where each line of the algorithms is, and its test
//! `return` lines, closing braces and comments of the paper's listings need none.
//!
//! | lines | what | code | test in `tests/control/algorithms.rs` |
//! |---|---|---|---|
//! | 1: 1 | every monitoring period | `Controller::step`, [`Event::Tick`] | `algorithm_1_line_1_…` |
//! | 1: 2-3 | Neutral runs Algorithm 2 | `controller::tick` | `algorithm_1_lines_2_3_…` |
//! | 1: 4-5 | Borrower runs Algorithm 3 | `controller::tick` | `algorithm_1_lines_4_5_…` |
//! | 1: 6-8 | Lender runs Algorithm 4 | `controller::tick` | `algorithm_1_lines_6_8_…` |
//! | 2: 1 | no request: stay Neutral | `neutral::tick` | `algorithm_2_line_1_…` |
//! | 2: 2-3 | M_req > M_s: `mem_bor_rej` | `lender::Lender::requested` | `algorithm_2_lines_2_3_…` |
//! | 2: 4-5 | M_u > T_upper M_t: `mem_bor_req` | `neutral::tick` | `algorithm_2_lines_4_5_…` |
//! | 2: 6-8 | ack: activate, Borrower | `borrowing`: `acknowledged`, `activate` | `algorithm_2_lines_6_8_…` |
//! | 2: 9-13 | grant: activate, ack, Lender | `lender::Lender::{requested, opened}` | `algorithm_2_lines_9_13_…` |
//! | 3: 1-2 | needed and feasible: stay Borrower | `borrower::Borrower::tick` | `algorithm_3_lines_1_2_…` |
//! | 3: 1 | `mem_len_fin`: not feasible | `evacuation`: `recalled` | `algorithm_3_line_1_…` |
//! | 3: 3-6 | deactivate, `mem_bor_fin`, Neutral | `borrower::Borrower::{tick, deactivated}` | `algorithm_3_lines_3_6_…` |
//! | 4: 1-2 | no `mem_bor_fin`: stay Lender | `lender::Lender::tick` | `algorithm_4_lines_1_2_…` |
//! | 4: 3-4 | M_u > T_upper M_t: `mem_len_fin` | `lender::Lender::recall` | `algorithm_4_lines_3_4_…` |
//! | 4: 5-7 | `mem_bor_fin`: deactivate, Neutral | `lender::Lender::{finished, freed}` | `algorithm_4_lines_5_7_…` |
//!
//! Equations 1 and 2: [`Memory::shareable`], tested in `memory.rs`. Several lenders, failures, restarts: `tests/control/protocol.rs`.
//! Any order, loss, doubling and crash: `tests/control/network.rs`.

pub mod balance;
mod borrower;
mod borrowing;
mod config;
mod controller;
mod decision;
mod evacuation;
mod event;
mod fins;
pub mod group;
mod lender;
mod loan;
mod memory;
mod message;
mod neutral;
mod placement;
mod recall;
mod round;
mod turn;

pub use borrower::{BorrowedStatus, VolumeState, VolumeStatus};
pub use config::{Config, ConfigError, Shareable};
pub use controller::{Controller, Restored};
pub use decision::{Because, Decision, Refusal, What};
pub use event::{Action, BorrowedLease, Cause, Event, LentLease, LiveVolume, Step};
pub use loan::{LentStatus, LoanState};
pub use memory::{Lent, Memory};
pub use message::{Message, Reason, RequestId, Role};
pub use placement::{Candidates, Offer};
pub use round::AskingStatus;
