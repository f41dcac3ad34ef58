//! A scanner's memory of a region's pages: which are unchanged, and which need no look in every
//! pass.

/// After this many looks at an unchanged and unequal page, it is looked at in every second pass.
/// After as many more it is every fourth, then every eighth. All such pages have the same passes,
/// so that equal ones are looked at together. (The kernel's KSM skips such pages, too:
/// `smart_scan`.)
const TIMES: u8 = 3;

/// The longest interval of a page, as the binary logarithm of the number of passes.
const LONGEST: u8 = 3;

/// The state of each page of a region.
#[derive(Debug)]
pub(crate) struct ScanHistory {
    /// A part of the page's fingerprint at the last look; 0 before the first one.
    fingerprints: Vec<u32>,
    /// Looks since the last change.
    calm: Vec<u8>,
}

impl ScanHistory {
    pub(crate) fn new(pages: u64) -> Self {
        Self { fingerprints: vec![0; pages as usize], calm: vec![0; pages as usize] }
    }

    /// Returns whether this pass must look at the page.
    pub(crate) fn is_due(&self, page: u64, pass: u64) -> bool {
        let waits = (self.calm[page as usize] / TIMES).min(LONGEST);
        pass.is_multiple_of(1 << waits)
    }

    /// Notes a look; returns whether the page is unchanged since the last one.
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
        let mut history = ScanHistory::new(2);
        assert!(!history.is_calm(1, 7) && history.is_calm(1, 7) && !history.is_calm(0, 7));
        assert!(!history.is_calm(1, 8) && history.is_calm(1, 8));
        // Also if the stored part of the fingerprint is zero.
        assert!(!history.is_calm(0, 1 << 32) && history.is_calm(0, 1 << 32));
    }

    #[test]
    fn an_unchanged_page_waits_longer_in_the_same_passes_as_others() {
        let mut history = ScanHistory::new(2);
        let mut looked = Vec::new();
        for pass in 0..64 {
            // The other page comes later.
            for page in [0].into_iter().chain((pass >= 21).then_some(1)) {
                if history.is_due(page, pass) {
                    history.is_calm(page, 7);
                    looked.push((page, pass));
                }
            }
        }
        let of = |page| looked.iter().filter(move |(is, _)| *is == page).map(|(_, pass)| *pass);
        assert!(of(0).eq([0, 1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 56]), "{looked:?}");
        assert!(of(1).filter(|pass| *pass > 40).eq([48, 56]), "{looked:?}");
        // A changed page is looked at in each pass again.
        history.is_calm(0, 8);
        assert!((64..70).all(|pass| history.is_due(0, pass)));
    }
}
