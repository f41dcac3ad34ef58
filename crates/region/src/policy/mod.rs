//! Which page leaves the local cache. To add a policy: a file here that implements [`Policy`], and a line in [`PolicyKind`].
//!
//! What a policy can know is what costs nothing to see: when a page came, and, if it [asks](Policy::looks_twice), whether
//! a page that it named was touched again in the time that it stayed in the cache outside all page tables (unmap and see). Nothing tells it
//! about touches of pages that are mapped: a userfaultfd sees none, and the accessed bits of a shared file are not to be
//! had from user space.

mod clock;
mod fifo;
mod list;
mod random;
mod round_robin;
mod sieve;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::named::named;

/// Chooses victims among the pages that programs have mapped.
pub trait Policy: fmt::Debug + Send {
    /// The page came.
    fn came(&mut self, page: u64);

    /// The page that was named as a victim was touched before it left, and stays.
    fn touched(&mut self, page: u64) {
        self.came(page);
    }

    /// The page went for another reason.
    fn went(&mut self, page: u64);

    /// Names a victim, which is none of its pages any more. None when there is none.
    fn victim(&mut self) -> Option<u64>;

    /// Whether victims are to stay in the cache for a while, so that a touch is seen.
    fn looks_twice(&self) -> bool {
        true
    }
}

/// The policies that there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyKind {
    /// One after the other by address, whatever they do (Disaggregation, section 4.3).
    RoundRobin,
    /// One after the other by address, but for those touched since the last time (Migration, section 3.3; Disaggregation, 4.3).
    #[default]
    Clock,
    /// In the order in which they came.
    Fifo,
    /// Any.
    Random,
    /// SIEVE: first in, first out, with a hand that spares what was touched where it stands (Zhang et al., NSDI 2024).
    Sieve,
}

named!(PolicyKind, "policy": RoundRobin "round-robin", Clock "clock", Fifo "fifo", Random "random", Sieve "sieve");

impl PolicyKind {
    /// One for a region of so many pages, none of which is there.
    pub fn make(self, pages: u64) -> Box<dyn Policy> {
        match self {
            Self::RoundRobin => Box::new(round_robin::round_robin(pages)),
            Self::Clock => Box::new(clock::Clock::new(pages)),
            Self::Fifo => Box::new(fifo::Fifo::new(pages)),
            Self::Random => Box::new(random::Random::new(pages)),
            Self::Sieve => Box::new(sieve::Sieve::new(pages)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// What every policy owes: it names each page that is there once, and no other.
    #[test]
    fn victims_are_the_pages_that_are_there() {
        for (kind, name) in PolicyKind::ALL {
            let mut policy = kind.make(1000);
            let mut there = HashSet::new();
            let mut random = 7_u64;
            for _ in 0..20_000 {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                let page = (random >> 33) % 1000;
                match (random >> 60) % 4 {
                    0 | 1 if there.insert(page) => policy.came(page),
                    2 if there.remove(&page) => policy.went(page),
                    3 => match policy.victim() {
                        Some(victim) => {
                            assert!(there.remove(&victim), "{name}: {victim} is not there");
                            if random & 1 == 0 {
                                policy.touched(victim);
                                there.insert(victim);
                            }
                        }
                        None => assert!(there.is_empty(), "{name}"),
                    },
                    _ => {}
                }
            }
            while let Some(victim) = policy.victim() {
                assert!(there.remove(&victim), "{name}: {victim} is not there");
            }
            assert!(there.is_empty(), "{name}: {there:?}");
        }
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        for (kind, name) in PolicyKind::ALL {
            assert_eq!(name.parse(), Ok(*kind));
            assert_eq!(kind.to_string(), *name);
        }
        assert!("lru".parse::<PolicyKind>().unwrap_err().contains("sieve"));
    }

    #[test]
    fn first_in_is_first_out() {
        let mut fifo = PolicyKind::Fifo.make(10);
        [5, 1, 9].iter().for_each(|page| fifo.came(*page));
        fifo.went(1);
        assert_eq!([fifo.victim(), fifo.victim(), fifo.victim()], [Some(5), Some(9), None]);
    }

    #[test]
    fn the_clocks_hand_goes_on_from_where_it_was() {
        for kind in [PolicyKind::Clock, PolicyKind::RoundRobin] {
            let mut policy = kind.make(10);
            [5, 1, 9].iter().for_each(|page| policy.came(*page));
            assert_eq!(policy.victim(), Some(1));
            policy.touched(1);
            assert_eq!(
                [policy.victim(), policy.victim(), policy.victim()],
                [Some(5), Some(9), Some(1)]
            );
        }
    }

    #[test]
    fn sieve_spares_the_touched_where_it_stands() {
        let mut sieve = PolicyKind::Sieve.make(10);
        [1, 2, 3].iter().for_each(|page| sieve.came(*page));
        assert_eq!(sieve.victim(), Some(1));
        sieve.touched(1);
        sieve.came(4);
        // The one that was touched is not asked again before the hand has been everywhere.
        assert_eq!(
            [sieve.victim(), sieve.victim(), sieve.victim(), sieve.victim()],
            [Some(2), Some(3), Some(4), Some(1)]
        );
    }
}
