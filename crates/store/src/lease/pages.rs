//! The two kinds of pages of a lease, behind one interface.

use std::ops::Range;
use std::sync::Arc;

use aquifer_page::export::ExportError;

use super::account::Account;
use crate::sharing::{SharedPages, SharedRead, SharedWrite};
use crate::span::{Span, runs};
use crate::sys::{LeasePages as _, PrivatePages, PrivateRead, PrivateWrite};

/// The pages of a lease: in a file of its own, or in frames that it shares with its group.
#[derive(Debug)]
pub(crate) enum Pages {
    Private(Arc<PrivatePages>),
    Shared(SharedPages),
}

impl Pages {
    /// Returns the first of `pages` that is stored or locked.
    pub(super) fn first_not_idle(&self, pages: Range<usize>) -> Option<usize> {
        match self {
            Self::Private(private) => private.first_not_idle(pages),
            Self::Shared(shared) => shared.table().first_not_idle(pages),
        }
    }

    /// Returns the runs of stored pages and holes in `pages`, a snapshot without locks.
    pub(super) fn peek_runs(
        &self,
        pages: Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, bool)> {
        runs(pages, move |page| match self {
            Self::Private(private) => private.stored(page),
            Self::Shared(shared) => shared.table().stored(page),
        })
    }

    /// Locks all of `pages` for reading, in ascending order.
    pub(super) fn read(&self, pages: Range<usize>) -> ReadRun<'_> {
        match self {
            Self::Private(private) => ReadRun::Private(private.read(pages)),
            Self::Shared(shared) => ReadRun::Shared(shared.read(pages)),
        }
    }

    /// Locks all of `pages` for reading if none is held for writing.
    pub(super) fn try_read(&self, pages: Range<usize>) -> Option<ReadRun<'_>> {
        match self {
            Self::Private(private) => private.try_read(pages).map(ReadRun::Private),
            Self::Shared(shared) => shared.try_read(pages).map(ReadRun::Shared),
        }
    }

    /// Locks all of `pages` for writing, in ascending order.
    pub(super) fn write(&self, pages: Range<usize>) -> WriteRun<'_> {
        match self {
            Self::Private(private) => WriteRun::Private(private.write(pages)),
            Self::Shared(shared) => WriteRun::Shared(shared.write(pages)),
        }
    }
}

/// Pages held for reading.
#[derive(Debug)]
pub(super) enum ReadRun<'a> {
    Private(PrivateRead<'a>),
    Shared(SharedRead<'a>),
}

impl ReadRun<'_> {
    /// Returns the pages in order, in runs whose bytes are contiguous, with those bytes, or `None`
    /// for holes.
    pub(super) fn pieces(&self) -> impl Iterator<Item = (Range<usize>, Option<&[u8]>)> {
        let pages = match self {
            Self::Private(private) => private.pages(),
            Self::Shared(shared) => shared.pages(),
        };
        let place = |page| match self {
            Self::Private(private) => private.stored(page).then_some((0, 0)),
            Self::Shared(shared) => shared.place(page),
        };
        runs(pages, place).map(|(pages, place)| {
            let bytes = place.map(|_| match self {
                Self::Private(private) => private.bytes(&pages),
                Self::Shared(shared) => shared.bytes(&pages),
            });
            (pages, bytes)
        })
    }
}

/// Pages held for writing.
#[derive(Debug)]
pub(super) enum WriteRun<'a> {
    Private(PrivateWrite<'a>),
    Shared(SharedWrite<'a>),
}

impl WriteRun<'_> {
    /// Stores the part of `data` that falls on the held pages; `data` begins where `span` does.
    /// Frees pages that become all zero.
    pub(super) fn store(
        &mut self,
        span: &Span,
        data: &[u8],
        account: &Account,
    ) -> Result<(), ExportError> {
        match self {
            Self::Private(private) => private.store(span, data, account),
            Self::Shared(shared) => shared.store(span, data, account),
        }
    }

    /// Stores all held pages, and zeroes their part of `span`.
    pub(super) fn allocate_zeroes(
        &mut self,
        span: &Span,
        account: &Account,
    ) -> Result<(), ExportError> {
        match self {
            Self::Private(private) => private.allocate_zeroes(span, account),
            Self::Shared(shared) => shared.allocate_zeroes(span, account),
        }
    }

    /// Zeroes the held pages' part of `span`, and frees the pages that become all zero.
    pub(super) fn clear(&mut self, span: &Span, account: &Account) -> Result<(), ExportError> {
        match self {
            Self::Private(private) => private.clear(span, account),
            Self::Shared(shared) => shared.clear(span, account),
        }
    }
}
