//! Reads whose caller does not wait for the answer any longer.

use std::mem;

use aquifer_page::PAGE_SIZE;

use super::{Deadline, Operation, Round};

/// The read whose answer is late, if there is one, and the room for that answer.
#[derive(Debug)]
pub struct Late<F> {
    read: Option<LateRead<F>>,
    room: Box<[u8]>,
}

/// A read whose answer is late.
#[derive(Debug)]
pub(super) struct LateRead<F> {
    pub(super) round: Round<F>,
    pub(super) offset: u64,
    pub(super) length: usize,
    /// The end of its time.
    pub(super) deadline: Deadline,
}

impl<F> Default for Late<F> {
    /// Makes the room now, as the page path does not allocate.
    fn default() -> Self {
        Self { read: None, room: vec![0; PAGE_SIZE].into_boxed_slice() }
    }
}

impl<F> Late<F> {
    /// Returns whether there is room for the answer of a read of `length` bytes.
    pub(super) fn has_room(length: usize) -> bool {
        length <= PAGE_SIZE
    }

    /// Returns the end of the time of the late read, if there is one.
    pub(super) fn deadline(&self) -> Option<Deadline> {
        self.read.as_ref().map(|read| read.deadline)
    }

    /// Notes that the answer of this read is late.
    pub(super) fn expect(&mut self, read: LateRead<F>) {
        self.read = Some(read);
    }

    /// Takes the late read and the room for its answer, which the caller [puts
    /// back](Self::put_back).
    pub(super) fn take(&mut self) -> Option<(LateRead<F>, Box<[u8]>)> {
        Some((self.read.take()?, mem::take(&mut self.room)))
    }

    /// Puts the room back, for the next time.
    pub(super) fn put_back(&mut self, room: Box<[u8]>) {
        self.room = room;
    }
}

impl<F> LateRead<F> {
    /// Returns the same read into the room.
    pub(super) fn again<'a>(&self, room: &'a mut [u8]) -> Operation<'a> {
        Operation::Read { offset: self.offset, into: &mut room[..self.length] }
    }
}
