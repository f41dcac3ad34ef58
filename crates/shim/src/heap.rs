//! A program whose heap is in a region.
//!
//! Where `aquifer region exec --heap` says so, what the program asks the kernel for as anonymous memory is taken from a region that is
//! mapped as a whole before the program begins. An allocator that gets its memory by `mmap` does the rest (jemalloc; the C library's own
//! cannot be seen asking).

use std::collections::BTreeMap;
use std::env;
use std::ffi::c_int;
use std::io;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use aquifer_page::PAGE_SIZE;

use crate::regions::{self, tell};
use crate::{allocator, sys};

/// The environment variable that says `FD:PROCESS`: the open file of the region, which is locked for as long as it is a heap, and whose heap.
const VARIABLE: &str = "AQUIFER_HEAP";

/// The size of a huge page, and what jemalloc's own blocks are aligned to.
const HUGE: usize = 2 << 20;

static HEAP: OnceLock<Heap> = OnceLock::new();

#[derive(Debug)]
struct Heap {
    all: Range<usize>,
    /// What nobody has, all of it zeroes: start and end.
    free: Mutex<BTreeMap<usize, usize>>,
}

/// Runs before the program does.
#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

extern "C" fn begin() {
    let Some(heap) = env::var_os(VARIABLE) else { return };
    let parts = heap.to_str().and_then(|heap| heap.split_once(':'));
    let Some((Ok(fd), Ok(process))) =
        parts.map(|(fd, process)| (fd.parse(), process.parse::<u32>()))
    else {
        return;
    };
    if process != std::process::id() {
        // What a program with such a heap runs has memory of its own. (A program that another one becomes by exec has the heap.)
        sys::close(fd);
        // SAFETY: no other thread is there yet.
        unsafe { env::remove_var(VARIABLE) };
        return;
    }
    let begun = set_up(fd);
    if let Err(error) = begun {
        tell(&format!("the heap of this program cannot be in a region: {error}"));
        // Rather than in memory that nobody wanted it to have.
        sys::exit(125);
    }
}

fn set_up(fd: c_int) -> io::Result<()> {
    if !sys::has(c"mallctl") {
        return Err(io::Error::other("jemalloc is not there (Debian: libjemalloc2)"));
    }
    allocator::stand_alone()?;
    let region = regions::region(fd)
        .ok_or_else(|| io::Error::other(format!("{VARIABLE} does not name a region")))?;
    let length = sys::size(fd).map_or(0, |size| size as usize);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping replaces nothing.
    let start = unsafe { regions::map(0, length, protection, libc::MAP_SHARED, (fd, 0), region) }?;
    // Not in the heap: a thread whose arena has no room there would not get ENOMEM, but end the program (jemalloc 5.3).
    sys::make_arenas();
    let all = start..start + length;
    // What a program before this one left is not for this one.
    regions::discard(&all)?;
    let free = Mutex::new(BTreeMap::from([(all.start, all.end)]));
    HEAP.set(Heap { all, free }).expect("this runs once");
    Ok(())
}

/// Whether the heap of this program is in a region.
pub(crate) fn is_there() -> bool {
    HEAP.get().is_some()
}

/// Memory for who asked the kernel for it like this. None where that is the kernel's business.
pub(crate) fn map(length: usize, protection: c_int, flags: c_int) -> Option<io::Result<usize>> {
    let heap = HEAP.get()?;
    let of_its_own = libc::MAP_FIXED
        | libc::MAP_FIXED_NOREPLACE
        | libc::MAP_GROWSDOWN
        | libc::MAP_HUGETLB
        | libc::MAP_STACK
        | libc::MAP_32BIT
        | libc::MAP_LOCKED;
    let anonymous =
        flags & (libc::MAP_ANONYMOUS | libc::MAP_TYPE) == libc::MAP_ANONYMOUS | libc::MAP_PRIVATE;
    let usual =
        protection == libc::PROT_READ | libc::PROT_WRITE && flags & of_its_own == 0 && length > 0;
    (anonymous && usual).then(|| {
        let taken = length.checked_next_multiple_of(PAGE_SIZE).and_then(|length| heap.take(length));
        taken.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
    })
}

/// The part of these addresses that is of the heap.
pub(crate) fn part_of(range: &Range<usize>) -> Option<Range<usize>> {
    let all = &HEAP.get()?.all;
    let part = range.start.max(all.start)..range.end.min(all.end);
    (part.start < part.end).then_some(part)
}

/// Takes back a part of the heap, which somebody had from [`map`].
pub(crate) fn unmap(part: Range<usize>) -> io::Result<()> {
    let Some(heap) = HEAP.get() else { return Ok(()) };
    let part = part.start..part.end.next_multiple_of(PAGE_SIZE);
    regions::discard(&part)?;
    // SAFETY: it is this library's mapping, and its user needs it no more.
    unsafe { sys::open_up(part.start, part.end - part.start, libc::PROT_READ | libc::PROT_WRITE) }?;
    heap.give_back(part);
    Ok(())
}

impl Heap {
    fn free(&self) -> MutexGuard<'_, BTreeMap<usize, usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first place where so much is free; of what is made of whole huge pages, the first that begins as one, if any does: jemalloc
    /// would ask for twice as much to find one, and there may be no room for that.
    fn take(&self, length: usize) -> Option<usize> {
        let mut free = self.free();
        let first = |align: usize| {
            free.iter().find_map(|(start, end)| {
                let at = start.next_multiple_of(align);
                (at < *end && end - at >= length).then_some((*start, at, *end))
            })
        };
        let aligned = if length.is_multiple_of(HUGE) { first(HUGE) } else { None };
        let (start, at, end) = aligned.or_else(|| first(1))?;
        free.remove(&start);
        for (start, end) in [(start, at), (at + length, end)] {
            if start < end {
                free.insert(start, end);
            }
        }
        Some(at)
    }

    fn give_back(&self, Range { mut start, mut end }: Range<usize>) {
        let mut free = self.free();
        // All that it touches or overlaps becomes one with it: who gives back twice gets it once.
        while let Some((other, other_end)) =
            free.range(..=end).next_back().map(|(from, to)| (*from, *to))
        {
            if other_end < start {
                break;
            }
            free.remove(&other);
            (start, end) = (start.min(other), end.max(other_end));
        }
        free.insert(start, end);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    #[test]
    fn what_is_given_back_can_be_had_again_as_one() {
        let heap = Heap { all: 0..100, free: Mutex::new(BTreeMap::from([(0, 100)])) };
        let parts: Vec<_> = (0..10).map(|_| heap.take(10).unwrap()).collect();
        assert_eq!(
            (parts.as_slice(), heap.take(1)),
            (&[0, 10, 20, 30, 40, 50, 60, 70, 80, 90][..], None)
        );
        for start in [20, 40, 30, 30, 90] {
            heap.give_back(start..start + 10);
        }
        assert_eq!(*heap.free(), BTreeMap::from([(20, 50), (90, 100)]));
        assert_eq!([heap.take(11), heap.take(30), heap.take(10)], [Some(20), None, Some(31)]);
        heap.give_back(0..95);
        assert_eq!(*heap.free(), BTreeMap::from([(0, 100)]));
    }

    #[test]
    fn what_is_as_large_as_huge_pages_begins_as_they_do() {
        let heap = Heap { all: 100..4 * HUGE, free: Mutex::new(BTreeMap::from([(100, 4 * HUGE)])) };
        assert_eq!(
            [heap.take(HUGE), heap.take(50), heap.take(2 * HUGE)],
            [Some(HUGE), Some(100), Some(2 * HUGE)]
        );
        assert_eq!(*heap.free(), BTreeMap::from([(150, HUGE)]));
        // Better so than not at all.
        heap.give_back(HUGE..2 * HUGE - 10);
        assert_eq!([heap.take(HUGE), heap.take(HUGE)], [Some(150), None]);
    }
}
