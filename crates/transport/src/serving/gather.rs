//! Slices of one send, and slices of zeroes.

use std::io::IoSlice;

/// Longest run of zeroes that one slice can point to.
pub const ZEROES: usize = 16 << 10;
static ZERO: [u8; ZEROES] = [0; ZEROES];

/// Returns slices that hold `length` zeroes in all.
pub fn zeroes(length: usize) -> impl Iterator<Item = &'static [u8]> {
    let last = length % ZEROES;
    std::iter::repeat_n(ZEROES, length / ZEROES)
        .chain((last > 0).then_some(last))
        .map(|length| &ZERO[..length])
}

/// Slices of one send, at most `SLICES`.
#[derive(Debug)]
pub struct Gather<'a, const SLICES: usize> {
    slices: [IoSlice<'a>; SLICES],
    count: usize,
    length: usize,
}

impl<'a, const SLICES: usize> Gather<'a, SLICES> {
    /// Begins with a slice.
    pub fn new(first: &'a [u8]) -> Self {
        let mut gather = Self { slices: [IoSlice::new(&[]); SLICES], count: 0, length: 0 };
        gather.push(first);
        gather
    }

    /// Adds a slice.
    pub fn push(&mut self, slice: &'a [u8]) {
        if !slice.is_empty() {
            self.slices[self.count] = IoSlice::new(slice);
            self.count += 1;
            self.length += slice.len();
        }
    }

    /// Adds slices of zeroes.
    pub fn push_zeroes(&mut self, length: usize) {
        zeroes(length).for_each(|zeroes| self.push(zeroes));
    }

    /// Returns the slices, in order.
    pub fn slices(&self) -> &[IoSlice<'a>] {
        &self.slices[..self.count]
    }

    /// Copies all but the first `sent` bytes into `aside` and returns the number of bytes copied.
    pub fn copy_rest(&self, sent: usize, aside: &mut [u8]) -> usize {
        let mut skip = sent;
        let mut filled = 0;
        if sent < self.length {
            for slice in self.slices() {
                let part = &slice[skip.min(slice.len())..];
                skip -= slice.len() - part.len();
                aside[filled..filled + part.len()].copy_from_slice(part);
                filled += part.len();
            }
        }
        filled
    }
}
