use std::ops::Range;
use std::sync::Arc;

use aquifer_page::{PAGE_SIZE, is_zero};

use super::frames::GroupFrames;
use crate::StoreError;
use crate::lease::Account;
use crate::span::Span;
use crate::sys::{FrameFile, HOLE, Table, TableRead, TableWrite};

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

    /// Takes all of `pages` for reading, in ascending order.
    pub(crate) fn read(&self, pages: Range<usize>) -> SharedRead<'_> {
        SharedRead { run: self.table.read(pages), frames: &self.frames }
    }

    /// Takes all of `pages` for reading if none needs waiting.
    pub(crate) fn try_read(&self, pages: Range<usize>) -> Option<SharedRead<'_>> {
        self.table.try_read(pages).map(|run| SharedRead { run, frames: &self.frames })
    }

    /// Takes all of `pages` for writing, in ascending order.
    pub(crate) fn write(&self, pages: Range<usize>) -> SharedWrite<'_> {
        SharedWrite { run: self.table.write(pages), frames: &self.frames }
    }
}

/// Pages held for reading. So their entries stay, and the frames with them.
#[derive(Debug)]
pub(crate) struct SharedRead<'a> {
    run: TableRead<'a>,
    frames: &'a GroupFrames,
}

impl SharedRead<'_> {
    /// All pages that are held.
    pub(crate) fn pages(&self) -> Range<usize> {
        self.run.pages()
    }

    /// What the page has in common with those whose bytes lie beside its own; nothing if it is not stored.
    pub(crate) fn place(&self, page: usize) -> Option<(usize, u32)> {
        let frame = self.run.entry(page);
        (frame != HOLE).then(|| (FrameFile::extent_of(frame), frame.wrapping_sub(page as u32)))
    }

    /// The bytes of `pages`, all of which are held, stored, and in the same [place](Self::place).
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
    /// Stores the part of `data` that falls on the pages that are held; it begins where `span` does.
    pub(crate) fn store(
        &mut self,
        span: &Span,
        data: &[u8],
        account: &Account,
    ) -> Result<(), StoreError> {
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

    /// Has all pages that are held be stored, and zeroes the part that is in `span`.
    pub(crate) fn allocate_zeroes(
        &mut self,
        span: &Span,
        account: &Account,
    ) -> Result<(), StoreError> {
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

    /// Zeroes the part of the pages that are held that is in `span`, and gives back those that are all zero then.
    pub(crate) fn clear(&mut self, span: &Span, account: &Account) -> Result<(), StoreError> {
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

    /// The page as it will be when `change` was made to the part of it that is in `span`.
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
    ) -> Result<(), StoreError> {
        if is_zero(content) {
            self.clear_page(page, account);
            return Ok(());
        }
        self.store_page(page, content, account)
    }

    /// Has the page be in a frame with this content. A crash at any point leaves the old page or the new one (except where
    /// there is no RAM for both), and at most frames to which no table refers, which the next open gives back.
    fn store_page(
        &mut self,
        page: usize,
        content: &[u8; PAGE_SIZE],
        account: &Account,
    ) -> Result<(), StoreError> {
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
            // What is stored can be overwritten though nothing is left, as long as nobody else has it.
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
