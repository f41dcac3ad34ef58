//! The division of a group's savings: its VMs get them by balloon, its secondary cache gets the
//! rest (\[Kim14\] sections 4.2.2, 4.2.3 and 6.2.2).
//!
//! Each period, [`Reprovisioner::step`] takes the group's [`Surplus`](super::Surplus) and its
//! [`Vm`]s, and returns a [`Plan`]: a new balloon target and a [`TargetDecision`] for each VM, and
//! the size of the [`Cache`].
//!
//! # Giving
//! A VM gets at most one step (10 MB in the paper) a period, and only if it has taken its earlier
//! steps. While surplus is left, VMs get a step in this order:
//! - [`Policy::Demand`]: VMs that swap, the one that swaps most first. A VM keeps its steps when it
//!   no longer swaps, because the steps may be the reason. The paper gives available memory, and
//!   takes only to cover a deficit.
//! - [`Policy::Fair`]: VMs below an equal part, the smallest first. If a VM at its max cannot take
//!   its part, the others share the rest.
//! - [`Policy::Entitlement`]: VMs below the part that their contribution to sharing earns, the one
//!   furthest below first.
//!
//! By the latter two policies, a VM above its part gives a step a period. So a VM that joins gets
//! its part.
//!
//! # Taking
//! When copies are broken (copy-on-write), the surplus shrinks. The cache is the rest of the
//! surplus, so it shrinks first, at once: all its pages can be discarded (section 4.2.3). If VMs
//! hold more than the surplus even so, they give back this **deficit** at once, in whole steps. The
//! paper says "an appropriate amount", and not from which VM. Here, steps that a guest has not
//! taken yet come first. Then, by demand, the VM that swaps least gives first (of equals, the
//! largest); by the other policies, the VM furthest above its part.
//!
//! # Guests that ignore their target
//! A VM counts with the larger of its target and its size. So no bytes are given twice: neither
//! those that a guest has not taken, nor those that it has not given back. The latter stay a
//! deficit, and the plan asks for them again. After [`Config::debt_periods`] periods without a step
//! of progress, the group's other VMs cover them. A group's deficit must not become a deficit of
//! other groups (section 4.2.2: isolation).
//!
//! # VMs that join and leave
//! A VM's surplus leaves with it: a VM that leaves no longer counts. A VM that joins with more than
//! its base counts from then on, and makes a deficit if the surplus does not cover it.

mod config;
mod decision;
mod plan;
mod reprovisioner;
mod targets;
mod vm_allocation;

pub use config::{Config, Policy};
pub use decision::{TargetDecision, Why};
pub use plan::{Cache, Plan};
pub use reprovisioner::Reprovisioner;
pub use vm_allocation::{Vm, handed};
