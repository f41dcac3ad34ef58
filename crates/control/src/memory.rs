//! A reading of a host's memory, and the thresholds and equations on it.

use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};

use crate::{Config, Shareable};

/// One reading of a host's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// M_t.
    pub total: Bytes,
    /// M_u. Includes the pages that this host stores for others.
    pub used: Bytes,
    /// S_u, the memory swapped out to borrowed devices.
    pub swap_used: Bytes,
    /// The kernel's early signal (PSI) that programs wait for memory; acts like M_u above T_upper.
    pub pressure: bool,
}

/// The sums over a lender's leases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lent {
    /// The capacity of all leases.
    pub granted: Bytes,
    /// The bytes that borrowers have stored in them.
    pub stored: Bytes,
    /// The capacity of those leases that hold second copies and go first.
    pub mirror: Bytes,
}

impl Memory {
    /// Returns whether M_u > T_upper M_t (Algorithm 2 line 4, Algorithm 4 line 3), or the kernel
    /// gives its early signal.
    pub fn overloaded(&self, config: &Config) -> bool {
        self.pressure || self.used > self.upper(config)
    }

    /// Returns whether M_u + S_u >= T_lower M_t (Algorithm 3 line 1), or the kernel gives its early
    /// signal. Above that threshold, swapped-out memory would not fit back in.
    pub fn needs_borrowed(&self, config: &Config) -> bool {
        let whole = self.used.saturating_add(self.swap_used);
        self.pressure || whole.0 as f64 >= self.total.0 as f64 * config.lower
    }

    /// Returns T_upper M_t.
    pub fn upper(&self, config: &Config) -> Bytes {
        self.total.scaled(config.upper)
    }

    /// Returns T_lower M_t.
    pub fn lower(&self, config: &Config) -> Bytes {
        self.total.scaled(config.lower)
    }

    /// Returns M_s by eq. 1 or eq. 2.
    pub fn shareable(&self, config: &Config) -> Bytes {
        match config.shareable {
            Shareable::Preconfigured { reserved } => self.total.saturating_sub(reserved),
            Shareable::Dynamic => self.total.saturating_sub(self.used),
        }
    }

    /// Returns how much more this host can grant and still stay within M_s and below T_upper M_t
    /// when every lease is full.
    ///
    /// M_u does not include granted bytes that are not stored yet, so this function subtracts them.
    /// A preconfigured M_s does not shrink as leases fill, so there it subtracts all granted bytes.
    pub fn spare(&self, config: &Config, lent: Lent) -> Bytes {
        let promised = lent.granted.saturating_sub(lent.stored);
        let taken = match config.shareable {
            Shareable::Preconfigured { .. } => lent.granted,
            Shareable::Dynamic => promised,
        };
        let by_share = self.shareable(config).saturating_sub(taken);
        let by_threshold = self.upper(config).saturating_sub(self.used).saturating_sub(promised);
        by_share.min(by_threshold)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(used: u64) -> Memory {
        Memory { total: Bytes::gib(10), used: Bytes::gib(used), ..Memory::default() }
    }

    fn preconfigured(reserved: u64) -> Config {
        Config {
            shareable: Shareable::Preconfigured { reserved: Bytes::gib(reserved) },
            ..Config::default()
        }
    }

    #[test]
    fn equation_1_subtracts_the_reserve_regardless_of_use() {
        for used in [0, 5, 10] {
            assert_eq!(memory(used).shareable(&preconfigured(3)), Bytes::gib(7));
        }
        assert_eq!(memory(0).shareable(&preconfigured(11)), Bytes::ZERO);
    }

    #[test]
    fn equation_2_takes_the_used_memory_off_the_total() {
        assert_eq!(memory(4).shareable(&Config::default()), Bytes::gib(6));
        assert_eq!(memory(10).shareable(&Config::default()), Bytes::ZERO);
    }

    #[test]
    fn a_host_is_overloaded_above_the_upper_threshold_and_not_at_it() {
        let config = Config::default();
        let at = memory(8);
        assert!(!at.overloaded(&config));
        assert!(Memory { used: at.used + Bytes(1), ..at }.overloaded(&config));
        assert!(Memory { pressure: true, ..memory(0) }.overloaded(&config));
    }

    #[test]
    fn borrowed_memory_is_needed_from_the_lower_threshold_up() {
        let config = Config::default();
        let at = Memory { used: Bytes::gib(2), swap_used: Bytes::gib(4), ..memory(0) };
        assert!(at.needs_borrowed(&config));
        assert!(!Memory { swap_used: Bytes::gib(4) - Bytes(1), ..at }.needs_borrowed(&config));
    }

    #[test]
    fn spare_keeps_room_for_promises_and_counts_stored_bytes_once() {
        let lent = |granted, stored| Lent {
            granted: Bytes::gib(granted),
            stored: Bytes::gib(stored),
            ..Lent::default()
        };
        let dynamic = Config::default();
        // T_upper M_t is 8 GiB; 3 GiB are used (1 GiB of them stored), and 2 GiB are still
        // promised.
        assert_eq!(memory(3).spare(&dynamic, lent(3, 1)), Bytes::gib(3));
        assert_eq!(memory(3).spare(&dynamic, lent(3, 3)), Bytes::gib(5));
        assert_eq!(memory(9).spare(&dynamic, lent(0, 0)), Bytes::ZERO);
        // M_s = 4 GiB by eq. 1: stored bytes do not make it larger.
        assert_eq!(memory(3).spare(&preconfigured(6), lent(3, 1)), Bytes::gib(1));
        assert_eq!(memory(3).spare(&preconfigured(6), lent(3, 3)), Bytes::gib(1));
    }
}
