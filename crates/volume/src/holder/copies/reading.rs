//! Reads of one of two copies: the better one first, and the other one if that is late or fails.

use std::iter;
use std::sync::atomic::Ordering;

use aquifer_page::WorkerId;

use super::{Copies, Copy, Done, Holder as _, HolderError, PAGE, Second, Wrong, touched};

impl Copies {
    /// Returns the copies, the better one to read first.
    pub(super) fn by_pace<'a>(&'a self, second: &'a Second) -> (&'a Copy, &'a Copy) {
        let both = (&self.first, &second.copy);
        let is_whole = second.file.is_none() && !second.is_behind.load(Ordering::Relaxed);
        match is_whole && both.0.pace.yields_to(&both.1.pace) {
            true => (both.1, both.0),
            false => both,
        }
    }

    /// Reads from the better copy, or else from the other one.
    pub(super) fn read_either(
        &self,
        worker: WorkerId,
        second: &Second,
        at: u64,
        into: &mut [u8],
    ) -> Done {
        let (one, other) = self.by_pace(second);
        let bytes = at..at + into.len() as u64;
        if touched(&bytes).count() == 1 {
            if self.read_hedged(second, (one, other), worker, at, into) {
                return Ok(());
            }
            let Err(error) = self.read_page(second, one, worker, at, into) else {
                return Ok(());
            };
            return match self.read_page(second, other, worker, at, into) {
                Ok(()) => {
                    // A copy that has yet to get the page is known to be behind.
                    if !matches!(error, HolderError::Wrong(Wrong::Unknown)) {
                        second.falls_behind(one, &error);
                    }
                    Ok(())
                }
                Err(other) => Err(second.worse(error, other)),
            };
        }
        let Err(error) = one.read(worker, at, into) else { return Ok(()) };
        let is_away = !matches!(error, HolderError::Wrong(_));
        if is_away && other.read(worker, at, into).is_ok() {
            second.falls_behind(one, &error);
            return Ok(());
        }
        // Each copy may have what the other lacks.
        let mut rest = into;
        let mut at = at;
        while !rest.is_empty() {
            let length = (PAGE - at % PAGE).min(rest.len() as u64);
            let (now, later) = rest.split_at_mut(length as usize);
            self.read_either(worker, second, at, now)?;
            (at, rest) = (at + length, later);
        }
        Ok(())
    }

    /// Reads a page from the first of two copies, or from the other one if the lender of the first
    /// is late. Returns false if the caller must read it in another way.
    fn read_hedged(
        &self,
        second: &Second,
        (one, other): (&Copy, &Copy),
        worker: WorkerId,
        at: u64,
        into: &mut [u8],
    ) -> bool {
        let page = at / PAGE;
        // The disk is no faster than a lender that is late.
        let is_choice = second.file.is_none() && other.answers();
        if !is_choice || [one, other].iter().any(|copy| copy.tags.is_lacking(page)) {
            return false;
        }
        match one.read_soon(worker, at, into, one.pace.patience(&other.pace)) {
            Ok(true) => true,
            Ok(false) => {
                second.late_reads.fetch_add(1, Ordering::Relaxed);
                other.read(worker, at, into).is_ok()
            }
            Err(_) => false,
        }
    }

    /// Reads a page, or a part of one, from a copy. If that proves the copy wrong, it forgets the
    /// page.
    pub(super) fn read_page(
        &self,
        second: &Second,
        copy: &Copy,
        worker: WorkerId,
        at: u64,
        into: &mut [u8],
    ) -> Done {
        let first_look = copy.read(worker, at, into);
        if !is_another_page(&first_look) {
            return first_look;
        }
        // A change may have ended meanwhile: this time none is under way.
        let bytes = at..at + into.len() as u64;
        let _turn = self.turns.take(iter::once(touched(&bytes)));
        let look = copy.run(|holder| holder.read(worker, at, into));
        if is_another_page(&look) {
            copy.forget(&bytes);
            look.as_ref().err().into_iter().for_each(|error| second.falls_behind(copy, error));
        }
        look
    }
}

/// Returns whether the copy returned another page than the one stored there, or seems to have.
fn is_another_page(read: &Done) -> bool {
    matches!(read, Err(HolderError::Wrong(Wrong::Zeroes | Wrong::Other)))
}
