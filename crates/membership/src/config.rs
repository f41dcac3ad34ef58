//! The protocol's times.

use std::num::{NonZeroU8, NonZeroUsize};
use std::time::Duration;

use foca::{Config, PeriodicParams};

use crate::seal::OVERHEAD;

/// The most bytes of a datagram. With the headers of IPv6 and UDP it fits an Ethernet frame.
const DATAGRAM: usize = 1400;

/// A host that is down is forgotten after this time, unless it comes back.
pub const FORGOTTEN_AFTER: Duration = Duration::from_secs(24 * 60 * 60);

const fn periodic(frequency: Duration, members: usize) -> Option<PeriodicParams> {
    let num_members = NonZeroUsize::new(members).expect("a number of members above zero");
    Some(PeriodicParams { frequency, num_members })
}

/// Returns the times with which hosts learn within five seconds that a host is down.
///
/// In a cluster of n hosts, each second brings 2.5n probes of random hosts. So a dead host is
/// probed within a second or two. The probe fails after 0.4 s, and the suspicion lasts 1.2 s. The
/// news then reaches every host within some periods of gossip.
pub(crate) const fn config() -> Config {
    Config {
        probe_period: Duration::from_millis(400),
        probe_rtt: Duration::from_millis(150),
        num_indirect_probes: NonZeroUsize::new(3).expect("not zero"),
        max_transmissions: NonZeroU8::new(10).expect("not zero"),
        suspect_to_down_after: Duration::from_millis(1200),
        remove_down_after: Some(FORGOTTEN_AFTER),
        max_packet_size: NonZeroUsize::new(DATAGRAM - OVERHEAD).expect("not zero"),
        notify_down_members: true,
        periodic_announce: periodic(Duration::from_secs(30), 1),
        periodic_announce_to_down_members: periodic(Duration::from_secs(5), 1),
        periodic_gossip: periodic(Duration::from_millis(250), 3),
    }
}
