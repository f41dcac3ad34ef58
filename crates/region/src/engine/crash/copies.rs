//! Second copies, and lenders of pairs that die: never both with the same page.

use std::rc::Rc;

use aquifer_page::{Bytes, LeaseId};
use aquifer_volume::{SecondCopy, VolumeError};

use super::lender::{Away, CrashLender};
use super::world::{Host, World, expect, wrong};
use crate::effect;

/// Scrubs after which each page of the largest region was verified.
const SCRUBS: usize = 16;

/// The first number of the leases for second copies.
const FIRST_COPY: u64 = 100;

impl World {
    /// Begins or ends a second copy, or does something to the lender of one of two copies.
    pub(super) fn change_copies(&self) {
        let host = self.host();
        // Copies do not change during a hand-over.
        if host.engine().is_being_sent() || self.other.borrow().is_some() {
            return;
        }
        match self.below(12) {
            0..3 => self.begin_copy(),
            3 => self.end_copy(),
            4..7 => self.lose_lender(Some(Away::Down)),
            7 => self.lose_lender(Some(Away::Lost)),
            8 => self.lose_lender(None),
            9 => self.pairs(&host).iter().for_each(|(of, copy)| {
                let one = if self.below(2) == 0 { *of } else { *copy };
                self.say(format_args!("lease {one} is backed up"));
                self.lender.back_up(one);
            }),
            10 => self.bring_back(),
            _ => _ = self.repair(),
        }
    }

    fn pairs(&self, host: &Host) -> Vec<(LeaseId, LeaseId)> {
        host.copies.borrow().iter().map(|(of, copy)| (*of, *copy)).collect()
    }

    pub(super) fn holder(&self, host: &Host, lease: LeaseId) -> CrashLender {
        let is_copy = lease.0 >= FIRST_COPY.into();
        CrashLender { host: host.number, lease, pages: self.lender.clone(), is_copy }
    }

    /// Describes a second copy to a volume. Each other one lags behind.
    pub(super) fn copy(&self, of: LeaseId, copy: LeaseId) -> SecondCopy {
        SecondCopy { of, lease: self.target(copy), lags: copy.0 % 2 == 1 }
    }

    /// Begins a second copy of a lease without one, as the region's process does.
    pub(super) fn begin_copy(&self) {
        let host = self.host();
        let number = self.copies.get();
        self.copies.set(number + 1);
        let copy = LeaseId((FIRST_COPY + number).into());
        let single: Vec<_> = {
            let (leases, copies) = (host.leases.borrow(), host.copies.borrow());
            leases.iter().filter(|lease| !copies.contains_key(lease)).copied().collect()
        };
        if single.is_empty() {
            return;
        }
        let of = single[self.below(single.len() as u64) as usize];
        let begun = self.run(&host, format_args!("begin copy {copy} of lease {of}"), |engine| {
            let holder = Box::new(self.holder(&host, copy));
            effect::at("tags");
            engine.volume().add_copy_holder(self.copy(of, copy), holder, |_| {
                effect::at("record");
                host.copies.borrow_mut().insert(of, copy);
                effect::at("copy");
                Ok::<_, VolumeError>(())
            })
        });
        match begun {
            Some(begun) => expect("begin a copy", begun),
            None => self.restart(&host),
        }
    }

    /// Ends a second copy.
    pub(super) fn end_copy(&self) {
        let host = self.host();
        let mut pairs = self.pairs(&host);
        // Only the copy may have a page whose lender has an old one, unless that was found out.
        let is_suspect = |lease: &LeaseId| self.suspects.borrow().contains(lease);
        pairs.retain(|(of, _)| !is_suspect(of));
        if let Some((of, copy)) = pairs.get(self.below(pairs.len().max(1) as u64) as usize) {
            self.end_this_copy(*of, *copy);
        }
    }

    /// Ends a second copy, unless only it has some page.
    pub(super) fn end_this_copy(&self, of: LeaseId, copy: LeaseId) {
        let host = self.host();
        let ended = self.run(&host, format_args!("end copy {copy}"), |engine| {
            let ended = engine.end_copy(copy);
            if ended.is_ok() {
                effect::at("record");
                host.copies.borrow_mut().remove(&of);
            }
            ended
        });
        match ended {
            Some(Err(error)) => self.say(format_args!("  {error}")),
            Some(Ok(_)) => {}
            None => self.restart(&host),
        }
    }

    /// Returns whether the lender of each copy of the pair has all that the other one has, and
    /// nobody changed it. A page in a ring would be lost with a lender and the engine.
    fn is_whole(&self, host: &Host, (of, copy): (LeaseId, LeaseId)) -> bool {
        let is_right = |lease: LeaseId| {
            self.lender.away(lease).is_none() && !self.suspects.borrow().contains(&lease)
        };
        let status = host.engine().volume().known_status();
        let copies = status.leases.iter().find(|lease| lease.lease == of).map(|lease| &lease.copy);
        copies.is_some_and(|copies| {
            copies.as_ref().is_some_and(|both| {
                let in_ring = both.ring.map_or(Bytes::ZERO, |ring| ring.used);
                both.lacks + both.first_lacks + in_ring == Bytes::ZERO
            })
        }) && is_right(of)
            && is_right(copy)
    }

    /// Does something to one lender of a pair, if the other one has all pages. `None` has it come
    /// back with a backup.
    fn lose_lender(&self, away: Option<Away>) {
        let host = self.host();
        let mut whole = self.pairs(&host);
        whole.retain(|pair| self.is_whole(&host, *pair));
        let Some((of, copy)) = whole.get(self.below(whole.len().max(1) as u64) as usize) else {
            return;
        };
        let lease = if self.below(2) == 0 { *of } else { *copy };
        match away {
            Some(Away::Down) => {
                self.say(format_args!("the lender of lease {lease} is down"));
                self.lender.kill(lease);
            }
            Some(Away::Lost) => {
                self.say(format_args!("the lender of lease {lease} is gone"));
                self.lender.lose(lease);
            }
            None => {
                self.say(format_args!("the lender of lease {lease} has a backup's pages"));
                self.lender.restore(lease);
                self.suspects.borrow_mut().insert(lease);
            }
        }
    }

    /// Brings all lenders back that did not lose their pages. Some have those of a backup.
    fn bring_back(&self) {
        for (of, copy) in self.pairs(&self.host()) {
            for lease in [of, copy] {
                if self.lender.away(lease) != Some(Away::Down) {
                    continue;
                }
                self.lender.bring_back(lease);
                let is_old = self.one_in(4);
                self.say(format_args!("the lender of lease {lease} is back, old: {is_old}"));
                if is_old {
                    self.lender.restore(lease);
                    self.suspects.borrow_mut().insert(lease);
                }
            }
        }
    }

    /// Verifies and repairs all copies. Returns false if an engine died meanwhile.
    fn repair(&self) -> bool {
        let host = self.host();
        let repaired = self.run(&host, "verify and repair copies", |engine| {
            (0..SCRUBS).for_each(|_| _ = engine.volume().scrub_copies());
            engine.volume().repair_copies(|| true)
        });
        let Some(is_whole) = repaired else {
            self.restart(&host);
            return false;
        };
        if is_whole {
            let up = |lease: &LeaseId| self.lender.away(*lease).is_none();
            self.suspects.borrow_mut().retain(|lease| !up(lease));
        }
        true
    }

    /// Makes both copies of each page whole, without the lenders that are gone.
    pub(super) fn mend(&self) {
        self.bring_back();
        for turn in 0..50 {
            let host = self.host();
            if turn > 3 {
                // A page whose write or discard was interrupted may be in a lost copy only.
                (0..self.shape.pages).for_each(|page| self.touch(&host, page, true));
            }
            // An interrupted write may have left the last version in the cache only.
            while !self.persist() {}
            let is_gone = |lease| self.lender.away(lease) == Some(Away::Lost);
            for (of, copy) in self.pairs(&host) {
                if is_gone(copy) {
                    self.end_this_copy(of, copy);
                } else if is_gone(of) {
                    let other = (1..=3).map(LeaseId).find(|other| *other != of && !is_gone(*other));
                    other.into_iter().for_each(|other| self.have_lease(other));
                    self.evacuate(of, true);
                }
            }
            let is_done = self.repair() && self.suspects.borrow().is_empty();
            let lost = self.pairs(&host).into_iter().any(|(of, copy)| is_gone(of) || is_gone(copy));
            if is_done && !lost && host.engine().volume().relies_on_copy(true).is_none() {
                return;
            }
        }
        wrong("copies are not whole although all lenders are there");
    }

    fn have_lease(&self, lease: LeaseId) {
        while !self.host().leases.borrow().contains(&lease) {
            self.add_lease(lease);
        }
    }

    /// Removes the second copies of a host that gave the region away.
    pub(super) fn remove_copies(&self, host: &Rc<Host>) {
        if host.copies.borrow().is_empty() || host.engine.borrow().is_none() {
            return;
        }
        // An engine that was killed while it ended a copy left no tags, so the next one cannot use
        // the copy. Its lease goes back with the pages.
        let used = host.engine().volume().copies();
        let done = self.run(host, "empty the second copies", |engine| {
            engine.volume().empty_copies();
        });
        if done.is_some() {
            for copy in used.iter().map(|copy| copy.lease.lease) {
                if self.lender.away(copy).is_none() && self.lender.count(copy) > 0 {
                    wrong(format_args!("copy {copy} was given up with pages"));
                }
            }
            host.copies.borrow_mut().clear();
        }
    }
}
