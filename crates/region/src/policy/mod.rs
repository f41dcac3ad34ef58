//! Policies that choose the pages to evict from the local cache. A new policy is a file here that
//! implements [`Policy`], and a line in [`PolicyKind`].
//!
//! A policy knows only facts that are cheap to observe. It hears when a page came. If it
//! [asks](Policy::looks_twice), its victims stay in the cache for a while, outside all page tables.
//! It hears if the program touches such a victim again. No source reports touches of mapped pages:
//! userfaultfd sees none, and user space cannot read the accessed bits of a shared file.

mod clock;
mod fifo;
mod list;
mod random;
mod round_robin;
mod sieve;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::named::named;

/// A policy for the choice of victims among the pages that programs have mapped.
pub trait Policy: fmt::Debug + Send {
    /// Notes that a page came into the cache.
    fn came(&mut self, page: u64);

    /// Notes that a victim was touched before it left, and stays.
    fn touched(&mut self, page: u64) {
        self.came(page);
    }

    /// Notes that a page left for another reason.
    fn went(&mut self, page: u64);

    /// Names a victim and forgets it. Returns `None` if the policy has no page.
    fn victim(&mut self) -> Option<u64>;

    /// Returns whether victims stay in the cache for a while, so that a touch is seen.
    fn looks_twice(&self) -> bool {
        true
    }
}

/// The policies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyKind {
    /// Takes pages by ascending address, regardless of touches (\[Lim12\], section 4).
    RoundRobin,
    /// Takes pages by ascending address, and skips those touched since the last round (\[Jo20\],
    /// section 4.1; \[Lim12\], section 4).
    #[default]
    Clock,
    /// Takes pages in the order in which they came.
    Fifo,
    /// Takes any page.
    Random,
    /// SIEVE: a FIFO with a hand that skips touched pages in place (Zhang et al., NSDI 2024).
    Sieve,
}

named!(
    PolicyKind,
    "policy": RoundRobin "round-robin", Clock "clock", Fifo "fifo", Random "random", Sieve "sieve"
);

impl PolicyKind {
    /// Makes the policy for a region of so many pages, none of which is in the cache.
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

    /// The contract of every policy: it names each page in the cache once, and no other.
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
        // The hand passes all other pages before it names the touched page again.
        assert_eq!(
            [sieve.victim(), sieve.victim(), sieve.victim(), sieve.victim()],
            [Some(2), Some(3), Some(4), Some(1)]
        );
    }
}
