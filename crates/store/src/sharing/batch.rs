//! A few frames for one operation of the kernel.

use std::ops::Range;

use crate::sys::FrameFile;

/// Frames for which the store takes or frees RAM at once, where it can.
pub(super) const BATCH: usize = 8;

/// A few frames, kept without a heap allocation.
#[derive(Debug, Default)]
pub(super) struct Batch {
    frames: [u32; BATCH],
    count: usize,
}

impl Batch {
    pub(super) fn len(&self) -> usize {
        self.count
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds a frame.
    ///
    /// # Panics
    /// If the batch is full.
    pub(super) fn push(&mut self, frame: u32) {
        self.frames[self.count] = frame;
        self.count += 1;
    }

    /// Returns the frames in ascending runs, none of which crosses a border between extents of
    /// address space.
    pub(super) fn into_runs(mut self) -> impl Iterator<Item = Range<u32>> {
        self.frames[..self.count].sort_unstable();
        let mut at = 0;
        std::iter::from_fn(move || {
            let rest = &self.frames[at..self.count];
            let start = *rest.first()?;
            let extent = FrameFile::extent_of(start);
            let follow = (start..).zip(rest);
            let length = follow
                .take_while(|&(next, &frame)| {
                    frame == next && FrameFile::extent_of(frame) == extent
                })
                .count();
            at += length;
            Some(start..start + length as u32)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_become_one_run() {
        let mut batch = Batch::default();
        let edge = 1 << 14;
        [7, 3, edge, 5, 4, edge - 1, 9, 8].into_iter().for_each(|frame| batch.push(frame));
        assert_eq!(batch.len(), BATCH);
        assert_eq!(
            batch.into_runs().collect::<Vec<_>>(),
            [3..6, 7..10, edge - 1..edge, edge..edge + 1]
        );
        assert!(Batch::default().is_empty());
        assert_eq!(Batch::default().into_runs().count(), 0);
    }
}
