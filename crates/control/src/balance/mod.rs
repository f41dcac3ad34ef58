//! The balancer of one host: moves memory between its VMs, as whole sections.
//!
//! It is the MON of "Dynamic guest memory resizing - paravirtualized approach" (Bielski et al. 2018), section III-B: it
//! sees what each guest counts itself, and what its applications have asked for (section III-C), and decides how large
//! each VM shall be. Another makes it so. Resizes are rounded as in section III-A: a VM grows by at least what it needs
//! and shrinks by no more than it can spare.
//!
//! Each period, [`Balancer::step`] takes the [`Host`] and a [`Reading`] of each VM, and returns a [`Plan`]: the
//! [`Move`]s, and a [`Verdict`] for each VM which says with its numbers why it is moved or left.
//!
//! # Who gets how much
//! 1. **Need.** What a guest uses, what it has swapped out, what its kernel keeps from its own count, a slack, and what
//!    applications wish for; at least one section more than it has when it swaps or waits for memory.
//! 2. **Free sections** cover all growth if they can. Then no VM is touched for another's sake.
//! 3. **Surplus** covers the rest: first what has lasted, and, if a VM swaps, waits for memory, has a wish or next to nothing free, also what is
//!    there now; of the VM with the largest surplus by weight first.
//! 4. **Fair shares** where that is not enough: what the VMs that may be touched have, and what is free, is divided by weight,
//!    max-min fair: nobody gets more than it needs, and what it does not need is divided among the others. Who has more
//!    than its share gives back down to it, but not what it uses. A VM below its min comes before all others.
//!
//! # Why it comes to rest
//! All that is remembered is what was read, never what was planned: a plan that nobody carried out (a dry run) changes
//! nothing. A VM grows only when it misses its slack by more than half a section, and gives only what it has beyond its
//! slack and half a section. So use that swings by a whole section, from lowest to highest, does not move memory to and
//! fro. A VM that grew gives nothing for a while, and where memory is scarce, nobody moves for less than a whole section
//! of distance from its share.

mod balancer;
mod config;
mod deal;
mod past;
mod plan;
mod reading;
mod section;
mod shares;
mod standing;
mod verdict;

pub use balancer::Balancer;
pub use config::{Config, ConfigError, Limits};
pub use plan::{Because, Give, Move, Plan, Want};
pub use reading::{Host, Reading};
pub use verdict::{Verdict, Why};
