//! Writes to the pages of a lease that does not share.

use std::ops::Range;

use aquifer_page::export::ExportError;
use aquifer_page::is_zero;

use super::account::Account;
use crate::span::{Span, runs};
use crate::sys::PrivateWrite;

impl PrivateWrite<'_> {
    /// Stores the part of `data` that falls on the held pages; `data` begins where `span` does.
    pub(super) fn store(
        &mut self,
        span: &Span,
        data: &[u8],
        account: &Account,
    ) -> Result<(), ExportError> {
        let zero = |page: usize| is_zero(&data[span.of_span(&(page..page + 1))]);
        for (pages, zero) in runs(self.pages(), zero) {
            if zero {
                self.clear_pages(span, pages, account)?;
            } else {
                self.provide(&pages, account)?;
                self.bytes(&pages)[span.of_pages(&pages)]
                    .copy_from_slice(&data[span.of_span(&pages)]);
            }
        }
        Ok(())
    }

    /// Takes RAM for the held pages, and zeroes their part of `span`.
    pub(super) fn allocate_zeroes(
        &mut self,
        span: &Span,
        account: &Account,
    ) -> Result<(), ExportError> {
        let pages = self.pages();
        self.provide(&pages, account)?;
        self.bytes(&pages)[span.of_pages(&pages)].fill(0);
        Ok(())
    }

    /// Zeroes the held pages' part of `span`, and frees the pages that become all zero.
    pub(super) fn clear(&mut self, span: &Span, account: &Account) -> Result<(), ExportError> {
        self.clear_pages(span, self.pages(), account)
    }

    fn clear_pages(
        &mut self,
        span: &Span,
        mut pages: Range<usize>,
        account: &Account,
    ) -> Result<(), ExportError> {
        // Only the first and the last page can be partly in the span.
        if self.stays_after_clearing(span, pages.start) {
            pages.start += 1;
        }
        if !pages.is_empty() && self.stays_after_clearing(span, pages.end - 1) {
            pages.end -= 1;
        }
        let mut at = pages.start;
        while let Some(stored) = self.next_run(at..pages.end, true) {
            self.punch(&stored).map_err(|source| account.no_memory(source))?;
            account.give_back(stored.len());
            at = stored.end;
        }
        Ok(())
    }

    /// If `span` covers this stored page only in part: zeroes that part and returns whether the
    /// rest holds data.
    fn stays_after_clearing(&mut self, span: &Span, page: usize) -> bool {
        if !span.cuts(page) || !self.stored(page) {
            return false;
        }
        let pages = page..page + 1;
        let bytes = self.bytes(&pages);
        bytes[span.of_pages(&pages)].fill(0);
        !is_zero(bytes)
    }

    /// Stores all of `pages` that are holes, as zeroes.
    fn provide(&mut self, pages: &Range<usize>, account: &Account) -> Result<(), ExportError> {
        let mut at = pages.start;
        while let Some(missing) = self.next_run(at..pages.end, false) {
            account.reserve(missing.len())?;
            if let Err(source) = self.populate(&missing) {
                account.give_back(missing.len());
                return Err(account.no_memory(source));
            }
            at = missing.end;
        }
        Ok(())
    }
}
