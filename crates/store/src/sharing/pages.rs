//! The pages of a lease that shares, and their locks.

use std::ops::Range;
use std::sync::Arc;

use aquifer_page::export::ExportError;
use aquifer_page::{PAGE_SIZE, is_zero};

use super::frames::GroupFrames;
use crate::lease::Account;
use crate::span::Span;
use crate::sys::{FrameFile, HOLE, LeasePages as _, Table, TableRead, TableWrite};

static ZEROES: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// The pages of a lease that shares: a table of the frames that hold them.
#[derive(Debug)]
pub(crate) struct SharedPages {
    table: Table,
    frames: Arc<GroupFrames>,
}

impl SharedPages {
    pub(crate) fn new(table: Table, frames: Arc<GroupFrames>) -> Self {
        Self { table, frames }
    }

    pub(crate) fn table(&self) -> &Table {
        &self.table
    }

    pub(crate) fn frames(&self) -> &GroupFrames {
        &self.frames
    }

    /// Locks all of `pages` for reading, in ascending order.
    pub(crate) fn read(&self, pages: Range<usize>) -> SharedRead<'_> {
        SharedRead { run: self.table.read(pages), frames: &self.frames }
    }

    /// Locks all of `pages` for reading if none is held for writing.
    pub(crate) fn try_read(&self, pages: Range<usize>) -> Option<SharedRead<'_>> {
        self.table.try_read(pages).map(|run| SharedRead { run, frames: &self.frames })
    }

    /// Locks all of `pages` for writing, in ascending order.
    pub(crate) fn write(&self, pages: Range<usize>) -> SharedWrite<'_> {
        SharedWrite { run: self.table.write(pages), frames: &self.frames }
    }
}

/// Pages held for reading, which keeps their entries and so their frames.
#[derive(Debug)]
pub(crate) struct SharedRead<'a> {
    run: TableRead<'a>,
    frames: &'a GroupFrames,
}

impl SharedRead<'_> {
    /// Returns all held pages.
    pub(crate) fn pages(&self) -> Range<usize> {
        self.run.pages()
    }

    /// Returns a key that is equal for neighbouring pages whose bytes are contiguous, or `None` for
    /// a hole.
    pub(crate) fn place(&self, page: usize) -> Option<(usize, u32)> {
        let frame = self.run.entry(page);
        (frame != HOLE).then(|| (FrameFile::extent_of(frame), frame.wrapping_sub(page as u32)))
    }

    /// Returns the bytes of `pages`, all of them held, stored, and in the same
    /// [place](Self::place).
    pub(crate) fn bytes(&self, pages: &Range<usize>) -> &[u8] {
        let first = self.run.entry(pages.start);
        self.frames.bytes(first..first + pages.len() as u32)
    }
}

/// Pages held for writing.
#[derive(Debug)]
pub(crate) struct SharedWrite<'a> {
    run: TableWrite<'a>,
    frames: &'a GroupFrames,
}

impl SharedWrite<'_> {
    /// Stores the part of `data` that falls on the held pages; `data` begins where `span` does.
    pub(crate) fn store(
        &mut self,
        span: &Span,
        data: &[u8],
        account: &Account,
    ) -> Result<(), ExportError> {
        for page in self.run.pages() {
            let part = &data[span.of_span(&(page..page + 1))];
            if let Ok(whole) = part.try_into() {
                self.store_or_clear(page, whole, account)?;
            } else {
                let changed = self.changed(span, page, |target| target.copy_from_slice(part));
                self.store_or_clear(page, &changed, account)?;
            }
        }
        Ok(())
    }

    /// Stores all held pages, and zeroes their part of `span`.
    pub(crate) fn allocate_zeroes(
        &mut self,
        span: &Span,
        account: &Account,
    ) -> Result<(), ExportError> {
        for page in self.run.pages() {
            if span.cuts(page) {
                let changed = self.changed(span, page, |target| target.fill(0));
                self.store_page(page, &changed, account)?;
            } else {
                self.store_page(page, &ZEROES, account)?;
            }
        }
        Ok(())
    }

    /// Zeroes the held pages' part of `span`, and frees the pages that become all zero.
    pub(crate) fn clear(&mut self, span: &Span, account: &Account) -> Result<(), ExportError> {
        for page in self.run.pages() {
            if span.cuts(page) && self.run.entry(page) != HOLE {
                let changed = self.changed(span, page, |target| target.fill(0));
                self.store_or_clear(page, &changed, account)?;
            } else {
                self.clear_page(page, account);
            }
        }
        Ok(())
    }

    /// Returns the page's content after `change` to the part that is in `span`.
    fn changed(&self, span: &Span, page: usize, change: impl FnOnce(&mut [u8])) -> [u8; PAGE_SIZE] {
        let frame = self.run.entry(page);
        let mut content = if frame == HOLE { ZEROES } else { *self.frames.page(frame) };
        change(&mut content[span.of_pages(&(page..page + 1))]);
        content
    }

    fn store_or_clear(
        &mut self,
        page: usize,
        content: &[u8; PAGE_SIZE],
        account: &Account,
    ) -> Result<(), ExportError> {
        if is_zero(content) {
            self.clear_page(page, account);
            return Ok(());
        }
        self.store_page(page, content, account)
    }

    /// Moves the page to a frame with this content. A crash at any point leaves the old page or the
    /// new one, except where there is no RAM for both. It leaves at most frames to which no table
    /// refers, which the next open frees.
    fn store_page(
        &mut self,
        page: usize,
        content: &[u8; PAGE_SIZE],
        account: &Account,
    ) -> Result<(), ExportError> {
        let old = self.run.entry(page);
        if old == HOLE {
            account.reserve(1)?;
        }
        let room = self.run.make_room(page);
        let new = match room.and_then(|()| self.frames.share(content)) {
            Ok(new) => new,
            Err(source) if old == HOLE => {
                account.give_back(1);
                return Err(account.no_memory(source));
            }
            // Without room for another frame, a page without sharers can still be overwritten in
            // place.
            Err(source) => match self.frames.rewrite(old, content) {
                Some(same) if same == old => return Ok(()),
                Some(new) => new,
                None => return Err(account.no_memory(source)),
            },
        };
        self.run.set(page, new);
        if old != HOLE && self.frames.release(old) && old != new {
            self.frames.broke();
        }
        Ok(())
    }

    fn clear_page(&mut self, page: usize, account: &Account) {
        let old = self.run.entry(page);
        if old != HOLE {
            self.run.set(page, HOLE);
            self.frames.release(old);
            account.give_back(1);
        }
    }
}
