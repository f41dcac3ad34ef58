//! The copy of one extent, piece by piece, between two slots.

use std::ops::Range;
use std::sync::Arc;

use aquifer_page::{Bytes, EXTENT_SIZE, PAGE_SIZE, WorkerId, is_zero};

use super::PAGE;
use crate::extent::{Extent, Move, Place};
use crate::holder::{HolderError, Piece};
use crate::lease::{Lease, Slot};

/// Bytes copied while I/O on the extent waits: 4 ms at 1 Gb/s.
const CHUNK: u64 = 512 << 10;
const PAGES_PER_CHUNK: usize = (CHUNK / PAGE) as usize;

/// The reason why a copy stopped.
pub(super) enum Halt {
    /// The source failed, and there is no other source.
    Source(HolderError),
    /// The destination failed, or the move was called off (`None`). There may be other
    /// destinations.
    Destination(Option<HolderError>),
}

/// Starts the move, if the extent is still on `source`. Returns the slot that the extent leaves.
pub(super) fn begin(extent: &Extent, source: &Arc<Lease>, to: &Slot) -> Option<Slot> {
    let mut place = extent.alone();
    let Place::At(from) = &*place else { return None };
    if !Arc::ptr_eq(&from.lease, source) {
        return None;
    }
    let from = from.clone();
    *place = Place::Moving(Move::new(from.clone(), to.clone()));
    Some(from)
}

/// Ends the move at its destination, after a call of `note`. If the extent was emptied meanwhile,
/// it has no place then. Returns the bytes that it holds.
pub(super) fn finish(extent: &Extent, note: impl FnOnce(Option<&Slot>)) -> Result<Bytes, Halt> {
    let mut place = extent.alone();
    match &*place {
        Place::Moving(moving) if moving.copied == EXTENT_SIZE && !moving.is_abandoned() => {
            let (to, holds) = (moving.to.clone(), extent.written.count());
            note((holds > 0).then_some(&to));
            *place = if holds > 0 {
                Place::At(to)
            } else {
                to.give_back(true);
                Place::Nowhere
            };
            Ok(Bytes(holds * PAGE))
        }
        _ => Err(Halt::Destination(None)),
    }
}

/// Ends the move at its source.
pub(super) fn call_off(extent: &Extent) {
    let mut place = extent.alone();
    if let Place::Moving(moving) = &*place {
        let from = moving.from.clone();
        *place = Place::At(from);
    }
}

/// Copies the extent piece by piece, and lets I/O proceed in between.
pub(super) fn copy(
    extent: &Extent,
    worker: WorkerId,
    buffer: &mut [u8],
    mut go_on: impl FnMut() -> bool,
) -> Result<(), Halt> {
    loop {
        let mut place = extent.alone();
        let Place::Moving(moving) = &mut *place else { return Err(Halt::Destination(None)) };
        if moving.is_abandoned() {
            return Err(Halt::Destination(None));
        }
        // Pages that were never written, or were discarded since, need no copy.
        let rest = extent.written.trim(&(moving.copied..EXTENT_SIZE));
        if rest.is_empty() {
            moving.copied = EXTENT_SIZE;
            return Ok(());
        }
        let chunk = rest.start..(rest.start + CHUNK).min(rest.end);
        copy_chunk(extent, moving, worker, &chunk, buffer)?;
        moving.copied = chunk.end;
        drop(place);
        extent.let_waiting_in();
        if !go_on() {
            return Err(Halt::Destination(None));
        }
    }
}

fn copy_chunk(
    extent: &Extent,
    moving: &Move,
    worker: WorkerId,
    chunk: &Range<u64>,
    buffer: &mut [u8],
) -> Result<(), Halt> {
    let data = &mut buffer[..(chunk.end - chunk.start) as usize];
    read_known(extent, moving, worker, chunk.start, data)
        .map_err(|error| Halt::Source(moving.from.judge(error)))?;
    let mut pieces: [Piece<'_>; PAGES_PER_CHUNK] = [(0, &[]); PAGES_PER_CHUNK];
    let mut used = 0;
    let holds = |page: &[u8], number: u64| extent.written.is_set(number) && !is_zero(page);
    let mut start = 0;
    // Writes only runs of pages that hold data, so that the new lender stores nothing else.
    for (at, page) in data.chunks(PAGE_SIZE).enumerate() {
        let at = at * PAGE_SIZE;
        if !holds(page, (chunk.start + at as u64) / PAGE) {
            start = at + page.len();
            continue;
        }
        let next = at + page.len();
        let goes_on = data.get(next..data.len().min(next + PAGE_SIZE)).is_some_and(|page| {
            !page.is_empty() && holds(page, (chunk.start + next as u64) / PAGE)
        });
        if !goes_on {
            pieces[used] = (chunk.start + start as u64, &data[start..next]);
            used += 1;
            start = next;
        }
    }
    moving
        .to
        .write_many(worker, &mut pieces[..used])
        .map_err(|error| Halt::Destination(Some(error)))
}

/// Reads the pages of the chunk. Those whose last write failed are zeroes then, and as unknown at
/// the destination as they were.
fn read_known(
    extent: &Extent,
    moving: &Move,
    worker: WorkerId,
    start: u64,
    data: &mut [u8],
) -> Result<(), HolderError> {
    let is_unknown = |at: &u64| moving.from.is_unknown(*at);
    let all = start..start + data.len() as u64;
    let mut at = start;
    while at < all.end {
        let next = (at..all.end).step_by(PAGE_SIZE).find(is_unknown);
        let end = next.unwrap_or(all.end);
        if at < end {
            let known = &mut data[(at - start) as usize..(end - start) as usize];
            moving.from.read(worker, at, known)?;
        }
        at = end;
        if next.is_some() {
            data[(at - start) as usize..][..PAGE_SIZE].fill(0);
            // A page that was discarded, or never written, is zeroes whatever the old slot holds.
            if extent.written.is_set(at / PAGE) {
                moving.to.forget(at);
            }
            at += PAGE;
        }
    }
    Ok(())
}

/// Makes the buffer for moves.
pub(crate) fn buffer() -> Box<[u8]> {
    vec![0; CHUNK as usize].into_boxed_slice()
}
