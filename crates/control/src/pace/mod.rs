//! The pace of lending: the rate that all borrowers share while this host is short of network or of
//! processors.
//!
//! Two policies, each with one file. [`NetworkShare`] keeps a part of the link's speed for this
//! host's own programs. [`FairRate`] makes borrowers wait for each other at the lender's limits,
//! where they take turns, and not for processors, where the host with the most connections wins.
//! Without either need there is no rate, and no request waits.

mod network;
mod processors;

use aquifer_page::Bytes;

pub use network::{Flow, LinkLoad, NetworkShare};
pub use processors::{FairRate, ProcessorLoad};

/// The reason for a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Short {
    /// The host's own programs use the link.
    Network,
    /// Several hosts' requests take all processors.
    Processors,
}

/// Both policies.
#[derive(Clone, Debug)]
pub struct Pace {
    network: NetworkShare,
    processors: FairRate,
}

impl Pace {
    /// Makes the policies for a lender that may use `share` of its link.
    pub fn new(share: f64) -> Self {
        Self { network: NetworkShare::new(share), processors: FairRate::default() }
    }

    /// Returns the bytes a second that all borrowers share from now on, and the reason. `link` is
    /// `None` if the speed of the link is unknown.
    pub fn step(
        &mut self,
        link: Option<&LinkLoad>,
        processors: &ProcessorLoad,
    ) -> Option<(Bytes, Short)> {
        let network = self.network.step(link).map(|rate| (rate, Short::Network));
        let processors = self.processors.step(processors).map(|rate| (rate, Short::Processors));
        network.into_iter().chain(processors).min_by_key(|(rate, _)| *rate)
    }
}
