//! What tests of Aquifer in guests are written with.

mod built;
mod cluster;
mod load;

use std::time::Duration;

pub use built::{aquifer, example, test};
pub use cluster::{Aquifer, member, with_admitted, with_cluster};
pub use load::Load;

/// How long anything may take that must happen, on emulated hosts of a busy machine: it is for hangs.
pub const PATIENCE: Duration = Duration::from_secs(600);
