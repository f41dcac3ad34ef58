//! Who gets what sharing saves in a group: its VMs by balloon, and what is left its secondary cache (Groups, sections
//! 4.2.2, 4.2.3 and 6.2.2).
//!
//! Each period, [`Reprovisioner::step`] takes the group's [`Surplus`](super::Surplus) and its [`Vm`]s, and returns a
//! [`Plan`]: a new balloon target and a [`Verdict`] for each VM, and the size of the [`Cache`].
//!
//! # Giving
//! A VM gets one step (10 MB in the paper) a period at most, and only if it has taken what it got before. Who gets one, in this
//! order while there is something left:
//! - [`Policy::Demand`]: who swaps; who swaps most first. What a VM has got it keeps, also when it does not swap any more:
//!   it may not do so because it has got it. The paper gives what is available, and takes only to cover a deficit.
//! - [`Policy::Fair`]: who has less than an equal part; who has least first. What one cannot take, as it is at its max, is
//!   divided among the others.
//! - [`Policy::Entitlement`]: who has less than its part by what it contributes to sharing; who lacks most first.
//!
//! By the latter two, who has more than its part gives a step a period. So a VM that joins gets its part.
//!
//! # Taking
//! When copies are broken (copy-on-write), the surplus shrinks. The cache is what is left of the surplus, so it shrinks
//! first, at once: all in it can be discarded (section 4.2.3). If VMs hold more than the surplus even so, this **deficit**
//! is taken back from them at once, as many steps as it has; the paper says "an appropriate amount", and not of whom:
//! what a guest has not taken yet comes first, then by demand who swaps least (and has most), by the others who is
//! furthest above its part.
//!
//! # Guests that do not do as told
//! What counts as handed out is the larger of what a VM was told to have and what it has. So nothing is given twice:
//! neither what a guest has not taken, nor what it has not given back. The latter stays a deficit and is asked for again.
//! After [`Config::patience`] periods without a step of progress the others have to cover it, as a group's deficit must
//! not become other groups' (section 4.2.2: isolation).
//!
//! # VMs that join and leave
//! What a VM holds beyond its own size goes with it: one that leaves no longer counts, one that joins with more than its
//! size counts from then on, and is a deficit if the surplus does not cover it.

mod config;
mod holding;
mod parts;
mod plan;
mod reprovisioner;
mod verdict;

pub use config::{Config, Policy};
pub use holding::{Vm, handed};
pub use plan::{Cache, Plan};
pub use reprovisioner::Reprovisioner;
pub use verdict::{Verdict, Why};
