//! How fast the scanner of a group looks for equal pages: Algorithm 1 of Groups (section 4.2.1).
//!
//! Additive increase, multiplicative decrease, as in TCP: the rate rises by a unit while CPU is left, or while memory is
//! short and scanning finds some; and is halved while CPU is scarce and scanning is not needed or of no use.
//!
//! | lines | what | where |
//! |---|---|---|
//! | 1-3 | CPU, swap and deduplication of the period | [`Activity`], read by the caller |
//! | 4-5 | CPU below the threshold: up | [`Why::CpuFree`] |
//! | 7-8 | no swap: down | [`Why::NoDemand`] |
//! | 10-11 | deduplication above its threshold: up | [`Why::Productive`] |
//! | 12-13 | no deduplication, or copies broken: down | [`Why::Unproductive`] |
//! | 14-16 | neither: as before | [`Why::LittleSaved`] |

mod config;
mod controller;
mod verdict;

pub use config::{Config, Rate, Variant};
pub use controller::{Activity, Controller};
pub use verdict::{Verdict, Why};
