//! A program with its heap in a region.
//!
//! With `aquifer region exec --heap`, anonymous memory that the program maps comes from a region
//! that is mapped whole before the program begins. This needs an allocator that calls `mmap`, such
//! as jemalloc. The C library's own allocator calls the kernel without a function that this library
//! can replace.

use std::collections::BTreeMap;
use std::env;
use std::ffi::c_int;
use std::io;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, OnceLock};

use aquifer_page::{HUGE_PAGE_SIZE, PAGE_SIZE, lock};

use crate::regions::{self, tell};
use crate::{allocator, sys};

/// The environment variable with the value `FD:PROCESS`: the region's open file, locked while it is
/// a heap, and the process that owns the heap.
const VARIABLE: &str = "AQUIFER_HEAP";

static HEAP: OnceLock<Heap> = OnceLock::new();

#[derive(Debug)]
struct Heap {
    all: Range<usize>,
    /// The free ranges, which read as zeroes, as start and end.
    free: Mutex<BTreeMap<usize, usize>>,
}

/// Makes the loader call [`begin`] before the program's own code.
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
        // A child program of a program with such a heap has memory of its own. A program that
        // replaces itself by exec keeps the process id, and so the heap.
        sys::close(fd);
        // SAFETY: no other thread runs yet.
        unsafe { env::remove_var(VARIABLE) };
        return;
    }
    let begun = set_up(fd);
    if let Err(error) = begun {
        tell(&format!("cannot place the program's heap in a region: {error}"));
        // Exits, as the operator did not want a heap in other memory.
        sys::exit(125);
    }
}

fn set_up(fd: c_int) -> io::Result<()> {
    if !sys::has(c"mallctl") {
        return Err(io::Error::other("jemalloc is missing; install it (Debian: libjemalloc2)"));
    }
    allocator::stand_alone()?;
    let region = regions::region(fd)
        .ok_or_else(|| io::Error::other(format!("{VARIABLE} does not name a region")))?;
    let length = sys::size(fd).map_or(0, |size| size as usize);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping replaces nothing.
    let start = unsafe { regions::map(0, length, protection, libc::MAP_SHARED, (fd, 0), region) }?;
    // Arenas are made outside the heap. A thread with no room for its arena would abort the
    // program, without `ENOMEM` (jemalloc 5.3).
    sys::make_arenas();
    let all = start..start + length;
    // Pages of an earlier program must not be visible to this one.
    regions::discard(&all)?;
    let free = Mutex::new(BTreeMap::from([(all.start, all.end)]));
    HEAP.set(Heap { all, free }).expect("this runs once");
    Ok(())
}

/// Returns whether the heap of this program is in a region.
pub(crate) fn is_there() -> bool {
    HEAP.get().is_some()
}

/// Serves an anonymous mapping from the heap. Returns `None` if the kernel must serve the call.
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

/// Returns the part of these addresses that is in the heap.
pub(crate) fn part_of(range: &Range<usize>) -> Option<Range<usize>> {
    let all = &HEAP.get()?.all;
    let part = range.start.max(all.start)..range.end.min(all.end);
    (part.start < part.end).then_some(part)
}

/// Frees a part of the heap that came from [`map`].
pub(crate) fn unmap(part: Range<usize>) -> io::Result<()> {
    let Some(heap) = HEAP.get() else { return Ok(()) };
    let part = part.start..part.end.next_multiple_of(PAGE_SIZE);
    regions::discard(&part)?;
    // SAFETY: the mapping is this library's, and its user no longer needs it.
    unsafe { sys::open_up(part.start, part.end - part.start, libc::PROT_READ | libc::PROT_WRITE) }?;
    heap.give_back(part);
    Ok(())
}

impl Heap {
    fn free(&self) -> MutexGuard<'_, BTreeMap<usize, usize>> {
        lock(&self.free)
    }

    /// Takes the first free range of this length. For whole huge pages, it prefers a range that
    /// begins at one. Otherwise jemalloc would ask for twice as much to align it, for which there
    /// may be no room.
    fn take(&self, length: usize) -> Option<usize> {
        let mut free = self.free();
        let first = |align: usize| {
            free.iter().find_map(|(start, end)| {
                let at = start.next_multiple_of(align);
                (at < *end && end - at >= length).then_some((*start, at, *end))
            })
        };
        let aligned =
            if length.is_multiple_of(HUGE_PAGE_SIZE) { first(HUGE_PAGE_SIZE) } else { None };
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
        // All ranges that this range touches or overlaps merge with it, so a double free is
        // harmless.
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
    fn freed_neighbours_merge_into_one_range() {
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
    fn large_ranges_start_at_huge_page_boundaries() {
        let heap = Heap {
            all: 100..4 * HUGE_PAGE_SIZE,
            free: Mutex::new(BTreeMap::from([(100, 4 * HUGE_PAGE_SIZE)])),
        };
        assert_eq!(
            [heap.take(HUGE_PAGE_SIZE), heap.take(50), heap.take(2 * HUGE_PAGE_SIZE)],
            [Some(HUGE_PAGE_SIZE), Some(100), Some(2 * HUGE_PAGE_SIZE)]
        );
        assert_eq!(*heap.free(), BTreeMap::from([(150, HUGE_PAGE_SIZE)]));
        // An unaligned range is better than none.
        heap.give_back(HUGE_PAGE_SIZE..2 * HUGE_PAGE_SIZE - 10);
        assert_eq!([heap.take(HUGE_PAGE_SIZE), heap.take(HUGE_PAGE_SIZE)], [Some(150), None]);
    }
}
