//! The pages of a mapping that its program still has mapped.

use std::ops::Range;

use aquifer_page::PageIndex;

use crate::message::Run;

/// Most runs that one message carries.
const TOLD: usize = 1024;

/// The pages of a mapping that are still mapped, as runs in ascending order. Program and engine
/// each keep such a list. The program may unmap parts, and the engine must not put a page where
/// another mapping may be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Live(Vec<Range<u64>>);

impl Live {
    /// Makes the list from runs in ascending order.
    pub fn new(runs: &[Run]) -> Self {
        Self(runs.iter().map(|run| run.first..run.first.saturating_add(run.count)).collect())
    }

    /// Removes pages from the list.
    pub fn remove(&mut self, gone: &Range<u64>) {
        let rest = |part: Range<u64>| {
            let before = part.start..part.end.min(gone.start);
            let after = part.start.max(gone.end)..part.end;
            [before, after].into_iter().filter(|part| part.start < part.end)
        };
        self.0 = std::mem::take(&mut self.0).into_iter().flat_map(rest).collect();
    }

    /// Returns whether no page is mapped any more.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether the page is still mapped.
    pub fn has(&self, page: PageIndex) -> bool {
        self.0.iter().any(|part| part.contains(&page.0))
    }

    /// Returns the parts of `within` that are still mapped.
    pub fn parts(&self, within: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let cut = |part: &Range<u64>| part.start.max(within.start)..part.end.min(within.end);
        self.0.iter().map(cut).filter(|part| part.start < part.end)
    }

    /// Returns all runs, for a message. If they exceed one message, the last run covers the rest
    /// and the gaps between.
    pub fn runs(&self) -> Vec<Run> {
        let mut runs: Vec<_> = self
            .0
            .iter()
            .map(|part| Run { first: part.start, count: part.end - part.start })
            .collect();
        if let (true, Some(last)) = (runs.len() > TOLD, runs.last().copied()) {
            runs.truncate(TOLD);
            let rest = &mut runs[TOLD - 1];
            rest.count = last.end() - rest.first;
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(first: u64, count: u64) -> Run {
        Run { first, count }
    }

    #[test]
    fn unmapped_pages_are_not_live() {
        let mut live = Live::new(&[run(10, 10)]);
        live.remove(&(12..14));
        live.remove(&(0..11));
        assert_eq!(live.runs(), [run(11, 1), run(14, 6)]);
        assert_eq!(live.parts(&(5..16)).collect::<Vec<_>>(), [11..12, 14..16]);
        let has = |page| live.has(PageIndex(page));
        assert!(has(11) && !has(12) && !has(20));
        live.remove(&(11..20));
        assert!(live.is_empty());
    }

    #[test]
    fn one_message_names_all_live_pages() {
        let runs: Vec<_> = (0..5000).map(|at| run(at * 2, 1)).collect();
        let live = Live::new(&runs);
        let told = Live::new(&live.runs());
        assert!(live.runs().len() <= TOLD && runs.iter().all(|run| told.has(PageIndex(run.first))));
    }
}
