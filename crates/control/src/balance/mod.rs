//! The balancer of one host: moves memory between its VMs, as whole sections.
//!
//! The balancer is the MON of \[Bielski18\] III-B: it reads the figures that each guest counts, and
//! the requests of the guests' applications (III-C), and decides each VM's size. The caller carries
//! the plan out. Resizes are rounded as in III-A: a VM grows by at least its need, and shrinks by
//! at most its surplus.
//!
//! Each period, [`Balancer::step`] takes the [`Host`] and a [`Reading`] of each VM, and returns a
//! [`Plan`]: the [`Move`]s, and a [`SizeDecision`] for each VM, with the reason and its
//! numbers.
//!
//! # The division
//! 1. **Need** is the sum of the guest's use, its swapped-out memory, its kernel's reserve, a slack
//!    and its applications' wishes. A guest that swaps or waits for memory needs at least one
//!    section more than its size.
//! 2. **Free sections** cover all growth if they can. Then no VM gives for another.
//! 3. **Surplus** covers the rest. The balancer takes lasting surplus first. For an urgent need
//!    (swapping, stalls, a wish, next to no free memory, fast growth) it also takes surplus that
//!    has not lasted. The VM with the largest surplus by weight gives first.
//! 4. **Fair shares** apply where that is not enough. The balancer divides the free memory and that
//!    of the VMs that take part by weight, max-min fair: no VM gets more than its need, and the
//!    others share the remainder. A VM above its share gives back down to it, but keeps the memory
//!    that it uses. A VM below its min comes before all others.
//!
//! # Why it comes to rest
//! The balancer remembers readings only, never plans, so a plan that is not carried out (a dry run)
//! changes nothing. A VM grows only when it misses its slack by more than half a section. A VM
//! gives only memory beyond its slack and half a section. So use that swings by a whole section,
//! from lowest to highest, moves no memory back and forth. A VM that grew gives nothing for a
//! while. Where memory is scarce, a VM moves only if it is at least a whole section away from its
//! share.

mod allocation;
mod balancer;
mod config;
mod decision;
mod history;
mod plan;
mod reading;
mod section;
mod shares;
mod vm_state;

pub use balancer::Balancer;
pub use config::{Config, ConfigError, Limits};
pub use decision::{SizeDecision, Why};
pub use plan::{Because, Give, Move, Plan, Want};
pub use reading::{Host, Reading};
