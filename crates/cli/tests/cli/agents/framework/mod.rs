//! Hosts, loads and strangers for tests, and functions that wait for them.

mod answer;
mod cluster;
mod host;
mod impostor;
pub mod liar;
mod load;
mod rights;
mod spec;
pub mod stranger;

use std::time::Duration;

pub use answer::Answer;
pub use aquifer_hosts::{block_on, wait_for, wait_until};
pub use cluster::{Cluster, address, init};
pub use host::{Host, lives, process};
pub use impostor::Impostor;
pub use load::{Load, program as load_program};
pub use rights::{lacks_rights, the_kernels_swap};
pub use spec::Spec;
pub use stranger::{Identity, Stranger};

/// The longest that any step without much data may take, generous for a busy machine.
pub const STEP_TIMEOUT: Duration = Duration::from_secs(60);
