//! The guests of the demo: they rewrite their memory, and verify every byte.

use std::ops::{Add, AddAssign};
use std::path::Path;

use aquifer_cli::failure::Result;
use aquifer_page::{Bytes, PAGE_SIZE};
use serde::Serialize;

use crate::user::{Holds, Part, User};

/// The memory that the first guest's program fills.
pub(super) const HELD: Bytes = Bytes::mib(112);

/// The pages that guests wrote and checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// Pages that guests wrote.
    #[serde(rename = "pages_written")]
    pub written: u64,
    /// Pages in which every byte equalled the last write.
    #[serde(rename = "pages_verified")]
    pub verified: u64,
    /// Pages in parts of memory with a byte that differed.
    #[serde(rename = "pages_wrong")]
    pub wrong: u64,
}

impl Tally {
    /// Counts one pass, in which the guest wrote and checked all that it holds.
    fn of(holds: &Holds) -> Self {
        let pages = |bytes: Bytes| bytes.0 / PAGE_SIZE as u64;
        // The guest counts wrong parts of 1 MiB.
        let (written, wrong) = (pages(holds.held), pages(Bytes::mib(holds.wrong)));
        Self { written, verified: written.saturating_sub(wrong), wrong }
    }
}

impl Add for Tally {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            written: self.written + other.written,
            verified: self.verified + other.verified,
            wrong: self.wrong + other.wrong,
        }
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

/// The program in the guest, and the count of its work.
#[derive(Debug)]
pub(super) struct Writer<'a> {
    user: User<'a>,
    /// The memory that the program fills.
    held: Bytes,
    /// The seed of the latest content.
    seed: u64,
    pub(super) tally: Tally,
}

impl<'a> Writer<'a> {
    /// Waits until the program in the booting guest listens.
    pub(super) fn meet(mut user: User<'a>, held: Bytes) -> Result<Self> {
        user.is_there()?;
        Ok(Self { user, held, seed: 0, tally: Tally::default() })
    }

    /// Connects to the program on the guest's new host, and lets it check every byte of its memory.
    pub(super) fn meet_again(&mut self, serial: &Path) -> Result<()> {
        self.user = User::meet(serial, self.user.wait)?;
        self.check()
    }

    /// Lets the program check every byte of its memory.
    pub(super) fn check(&mut self) -> Result<()> {
        let holds = self.hold()?;
        self.tally += Tally { written: 0, verified: 0, ..Tally::of(&holds) };
        Ok(())
    }

    /// Lets the program write new content to all of its memory, then check every byte.
    pub(super) fn pass(&mut self) -> Result<()> {
        self.seed += 1;
        let holds = self.hold()?;
        self.tally += Tally::of(&holds);
        Ok(())
    }

    /// Lets the program give up memory beyond so much, and write new content to the rest.
    pub(super) fn pass_less(&mut self, held: Bytes) -> Result<()> {
        self.held = held;
        self.pass()
    }

    /// Lets the program write the content that another guest's program has.
    pub(super) fn copy(&mut self, other: &Self) -> Result<()> {
        self.seed = other.seed - 1;
        self.pass()
    }

    fn hold(&mut self) -> Result<Holds> {
        self.user.hold(Part { number: 0, seed: self.seed }, self.held)
    }

    /// Makes passes until `is` holds after one; at least one.
    pub(super) fn pass_until(&mut self, mut is: impl FnMut() -> Result<bool>) -> Result<()> {
        loop {
            self.pass()?;
            if is()? {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_part_counts_with_all_of_its_pages() {
        let holds = Holds { held: HELD, wrong: 2, part: Part::default(), errors: 0 };
        let mut tally = Tally::of(&holds);
        assert_eq!(tally, Tally { written: 28_672, verified: 28_160, wrong: 512 });
        tally += Tally::of(&Holds { wrong: 0, ..holds });
        assert_eq!(tally, Tally { written: 57_344, verified: 56_832, wrong: 512 });
    }
}
