//! What a scanner has seen of a region's pages: which are calm, and which it need not look at in every pass.

/// A page that was so often as it was before, and like no other, is looked at in every second pass; in every fourth after as many times more, and then in every
/// eighth. They are the same passes for all such pages, so that two that are equal are looked at together. (The kernel's KSM passes over such pages, too:
/// `smart_scan`.)
const TIMES: u8 = 3;

/// By powers of two: the longest that a page waits, in passes.
const LONGEST: u8 = 3;

/// Of each page of a region.
#[derive(Debug)]
pub(crate) struct Seen {
    /// A part of its fingerprint when it was last looked at; 0 if it was not.
    fingerprints: Vec<u32>,
    /// How often it was found to be as it was.
    calm: Vec<u8>,
}

impl Seen {
    pub(crate) fn new(pages: u64) -> Self {
        Self { fingerprints: vec![0; pages as usize], calm: vec![0; pages as usize] }
    }

    /// Whether the page is to be looked at in this pass.
    pub(crate) fn is_due(&self, page: u64, pass: u64) -> bool {
        let waits = (self.calm[page as usize] / TIMES).min(LONGEST);
        pass.is_multiple_of(1 << waits)
    }

    /// It is looked at. Whether it is what it was the last time.
    pub(crate) fn is_calm(&mut self, page: u64, fingerprint: u64) -> bool {
        let (part, page) = ((fingerprint as u32).max(1), page as usize);
        let is_calm = std::mem::replace(&mut self.fingerprints[page], part) == part;
        self.calm[page] = if is_calm { self.calm[page].saturating_add(1) } else { 0 };
        is_calm
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_calm_when_it_is_as_it_was() {
        let mut seen = Seen::new(2);
        assert!(!seen.is_calm(1, 7) && seen.is_calm(1, 7) && !seen.is_calm(0, 7));
        assert!(!seen.is_calm(1, 8) && seen.is_calm(1, 8));
        // Also where all that is kept of its fingerprint is nothing.
        assert!(!seen.is_calm(0, 1 << 32) && seen.is_calm(0, 1 << 32));
    }

    #[test]
    fn one_that_stays_as_it_is_waits_longer_and_in_the_same_passes_as_others() {
        let mut seen = Seen::new(2);
        let mut looked = Vec::new();
        for pass in 0..64 {
            // The other one comes later.
            for page in [0].into_iter().chain((pass >= 21).then_some(1)) {
                if seen.is_due(page, pass) {
                    seen.is_calm(page, 7);
                    looked.push((page, pass));
                }
            }
        }
        let of = |page| looked.iter().filter(move |(is, _)| *is == page).map(|(_, pass)| *pass);
        assert!(of(0).eq([0, 1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 56]), "{looked:?}");
        assert!(of(1).filter(|pass| *pass > 40).eq([48, 56]), "{looked:?}");
        // What was written is looked at each time again.
        seen.is_calm(0, 8);
        assert!((64..70).all(|pass| seen.is_due(0, pass)));
    }
}
