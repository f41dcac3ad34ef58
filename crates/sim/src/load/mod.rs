//! The memory that a host's programs demand over time.

mod synthetic;
mod trace;

use std::time::Duration;

use aquifer_page::Bytes;

pub use synthetic::{Synthetic, synthetic_hosts};
pub use trace::{TraceError, read_trace};

/// The memory that a host's programs demand over time.
#[derive(Clone, Debug)]
pub enum Load {
    /// Swinging demand with bursts.
    Synthetic(Box<Synthetic>),
    /// Demand that changes at these times, in ascending order. Before the first, it is zero.
    Steps(Vec<(Duration, Bytes)>),
}

impl Load {
    /// Returns a load that never changes.
    pub fn constant(bytes: Bytes) -> Self {
        Self::Steps(vec![(Duration::ZERO, bytes)])
    }

    /// Returns the demand at this time, which does not go back from call to call.
    pub(crate) fn demand(&mut self, now: Duration) -> Bytes {
        match self {
            Self::Synthetic(synthetic) => synthetic.demand(now),
            Self::Steps(steps) => {
                let after = steps.partition_point(|(at, _)| *at <= now);
                after.checked_sub(1).map_or(Bytes::ZERO, |last| steps[last].1)
            }
        }
    }
}
