//! The rate of a group's scan for equal pages: Algorithm 1 of \[Kim14\] (section 4.2.1).
//!
//! Additive increase, multiplicative decrease, as in TCP. The rate rises by a unit while CPU is
//! left, or while memory is short and scanning saves enough. The rate is halved while CPU is scarce
//! and scanning is not needed or saves nothing.
//!
//! | lines | rule | code |
//! |---|---|---|
//! | 1-3 | CPU, swap and deduplication of the period | [`Activity`], read by the caller |
//! | 4-5 | CPU below the threshold: up | [`Why::CpuFree`] |
//! | 7-8 | no swap: down | [`Why::NoDemand`] |
//! | 10-11 | deduplication above its threshold: up | [`Why::Productive`] |
//! | 12-13 | no deduplication, or copies broken: down | [`Why::Unproductive`] |
//! | 14-16 | neither: unchanged | [`Why::LittleSaved`] |

mod config;
mod controller;
mod decision;

pub use config::{Config, Rate, Variant};
pub use controller::{Activity, Controller};
pub use decision::{RateDecision, Why};
