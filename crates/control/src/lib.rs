//! Decisions as pure state machines: no clock, no I/O.
//!
//! [`node::Node`] is all that one host decides about lent and borrowed memory. An agent is its
//! shell: it feeds the node readings, messages, orders and the ends of actions, each with its time,
//! and carries out what the node returns.
//!
//! Inside a node, [`Controller`] is the controller of \[Ge23\] (Algorithms 1-4, eqs. 1 and 2, Figs.
//! 3-5), for many borrowers and many lenders. It takes [`Event`]s and returns [`Action`]s, and
//! [`Decision`]s, each of which explains itself with its numbers.
//!
//! A [`Ledger`](ledger::Ledger) is the account of a host's memory. A lender spares no more than the
//! ledger has free, whatever M_s is.
//!
//! [`balance`] is another machine, for one host: it moves memory between the host's VMs. [`group`]
//! has three more, for the memory that the VMs of one tenant on a host save by sharing pages.
//! [`restart`] starts VMs at boot and after failures. The rest of this page is about the controller
//! and the node around it.
//!
//! # Invariants under any network
//! Messages may be lost, duplicated and reordered, and either agent may restart at any moment:
//! - **No direct step between Borrower and Lender.** The code has only the four edges of Fig. 3
//!   (`controller::next_role`). For swap, a host grants nothing while it asks, and does not ask
//!   while it lends. Roles do not limit leases for regions, either way.
//! - **A lender frees a lease only when its borrower sent `mem_bor_fin`**, or was silent for
//!   [`Config::grace`]. A borrower sends `mem_bor_fin` only for a lease that none of its volumes
//!   and regions uses.
//! - **No fin is lost, no lease leaks.** The borrower repeats each fin until the lender has it.
//!   `mem_bor_ack` doubles as the question "do you hold this lease?". The lender repeats it to a
//!   silent borrower, and a borrower that does not hold the lease answers `mem_bor_fin`. So if a
//!   crash loses state on one side, the other side asks for it again.
//! - **One lease a request**, however often the request arrives.
//! - **One work at a time on a subject**: a volume, a lease, a message. The controller may order it
//!   again meanwhile; the node begins it once.
//! - **At most one answer to a request.** A borrower's `mem_bor_fin` is answered when the memory is
//!   free, so that both hosts agree.
//! - **A host that is no longer a peer can only settle leases** that it shares with this host.
//!
//! # Each line of the algorithms, its code and its test
//! `return` lines, closing braces and comments of the paper's listings need none.
//!
//! | lines | step | code | test in `tests/control/algorithms.rs`, after `algorithm_` |
//! |---|---|---|---|
//! | 1: 1 | every monitoring period | `Controller::step`, [`Event::Tick`] | `1_line_1_…` |
//! | 1: 2-3 | Neutral runs Algorithm 2 | `controller::tick` | `1_lines_2_3_…` |
//! | 1: 4-5 | Borrower runs Algorithm 3 | `controller::tick` | `1_lines_4_5_…` |
//! | 1: 6-8 | Lender runs Algorithm 4 | `controller::tick` | `1_lines_6_8_…` |
//! | 2: 1 | no request: stay Neutral | `neutral::tick` | `2_line_1_…` |
//! | 2: 2-3 | M_req > M_s: `mem_bor_rej` | `LenderRole::requested` | `2_lines_2_3_…` |
//! | 2: 4-5 | M_u > T_upper M_t: `mem_bor_req` | `neutral::tick` | `2_lines_4_5_…` |
//! | 2: 6-8 | ack: activate, Borrower | `Borrower::{acknowledged, activate}` | `2_lines_6_8_…` |
//! | 2: 9-13 | grant: activate, ack | `LenderRole::{requested, opened}` | `2_lines_9_13_…` |
//! | 3: 1-2 | needed and feasible: stay Borrower | `Borrower::tick` | `3_lines_1_2_…` |
//! | 3: 1 | `mem_len_fin`: not feasible | `Borrower::recalled` | `3_line_1_…` |
//! | 3: 3-6 | deactivate, fin, Neutral | `Borrower::{tick, deactivated}` | `3_lines_3_6_…` |
//! | 4: 1-2 | no `mem_bor_fin`: stay Lender | `LenderRole::tick` | `4_lines_1_2_…` |
//! | 4: 3-4 | M_u > T_upper M_t: `mem_len_fin` | `LenderRole::recall` | `4_lines_3_4_…` |
//! | 4: 5-7 | `mem_bor_fin`: deactivate | `LenderRole::{finished, freed}` | `4_lines_5_7_…` |
//!
//! Equations 1 and 2 are [`Memory::shareable`], tested in `memory.rs`. `tests/control/protocol.rs`
//! has several lenders, failures and restarts. `tests/control/network.rs` has reordering, loss,
//! duplication and crashes. The crate `sim` runs whole nodes on hosts whose copies take time.
//!
//! # Each decision of the node, its code and its test
//! Files are in `src/node/` and `tests/control/node/`, where `random` also tests the invariants of
//! work and answers under random inputs. Tests are named by their beginnings.
//!
//! | decision | code | test |
//! |---|---|---|
//! | ask peers for offers | `offers`: `wants_offers` | `period::offers_` |
//! | let recalls wait for offers | `offers`: `with_offers` | `messages::a_recall_` |
//! | admit a message | `hear`: `may_say` | `messages::a_former_peer_` |
//! | answer a fin | `hear`: `take_in` | `messages::a_repeated_fin_` |
//! | notice life of borrowers | `hear`: `renewal`, `saw` | `messages::a_renewal_` |
//! | count a borrower's silence | `period`: `note_connections` | `period::silence_` |
//! | begin work once | `node`: `begin` | `messages::a_message_in_` |
//! | end work, well or not | `settle`: `said`, `done` | `orders::results_` |
//! | settle with former peers | `part`: `part_with_former_peers` | `messages::leases_` |
//! | renew at lenders | `period`: `renew` | `period::renewals_` |
//! | compare volumes | `watch`: `Watch::look` | `period::a_lost_lease_` |
//! | remove the dead | `period`: `clear_away` | `period::a_dead_volume_` |
//! | borrow and return | `orders`: `Orders` | `orders::a_return_` |
//! | let a volume leave | `fit`: `fits_without` | `orders::a_volume_` |
//! | lend beside promises to VMs | `lender`: `spare`, `limiting` | `ledger::a_host_does_not_` |
//! | drain, and say what stays | `drain`: `drain`, `left` | `drain::a_drain_` |
//! | give regions all they ask for or nothing | `regions`: `provide` | `regions::a_region_` |
//! | take leases back from a lost region | `regions`: `region_gone` | `regions::the_leases_` |
//! | move VMs away in a drain | `moves`: `next_to_vacate` | `moves::a_drain_` |
//! | move a VM from lasting overload | `moves`: `relief` | `moves::a_vm_leaves_` |
//! | back off after a failed move | `moves`: `failed` | `moves::a_failed_move_` |
//! | let the host leave the cluster | `leave`: `leave` | `leave::a_host_` |
//! | replace a lease with an old key | `keys`: `rotate_keys` | `keys::an_old_` |
//! | keep a lease that nothing replaces | `keys`: `rotate` | `keys::without_room_` |

pub mod balance;
mod borrower;
mod borrowing;
mod config;
mod controller;
mod copies;
mod decision;
mod evacuation;
mod event;
pub mod group;
pub mod ledger;
mod lender;
mod loan;
mod memory;
mod message;
mod neutral;
pub mod node;
mod owner;
pub mod pace;
mod pending_release;
mod placement;
mod protection;
mod regions;
pub mod restart;
mod rotation;
mod round;
mod step_context;
mod subject;
mod transfer;

pub use borrower::{BorrowedStatus, VolumeState, VolumeStatus};
pub use config::{Config, ConfigError, Shareable};
pub use controller::{Controller, Restored};
pub use decision::{Because, Decision, Refusal, What};
pub use event::{Action, BorrowedLease, Cause, Event, LentLease, LiveVolume, RegionRequest, Step};
pub use loan::{LentStatus, LoanState};
pub use memory::{Lent, Memory};
pub use message::{Message, Reason, RequestId, Role};
pub use owner::Owner;
pub use placement::{Candidates, Offer};
pub use protection::{Protection, Protections};
pub use round::AskingStatus;
pub use subject::Subject;
