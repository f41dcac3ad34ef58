//! A thread with its own pages in leases that all threads share.

use std::sync::Arc;

use aquifer_page::export::{Run, Segment};
use aquifer_page::{Bytes, LeaseId, PAGE_SIZE};
use aquifer_store::{Lease, Store};

use super::model::Pages;
use super::{COMMON, GROUPS};
use crate::common::{Random, shared_record};

/// Pages of each thread in each lease.
pub const PAGES: usize = 64;

/// A thread's part of a lease.
struct Part {
    id: LeaseId,
    group: &'static str,
    lease: Option<Arc<Lease>>,
    /// The first page of the part.
    base: usize,
    model: Pages,
}

impl Part {
    fn new(lease: Arc<Lease>, group: &'static str, base: usize) -> Self {
        Self { id: lease.id(), group, lease: Some(lease), base, model: Pages::holes(PAGES) }
    }

    fn lease(&self) -> &Lease {
        self.lease.as_ref().unwrap()
    }

    fn offset(&self, page: usize) -> u64 {
        ((self.base + page) * PAGE_SIZE) as u64
    }
}

pub struct Worker<'a> {
    random: Random,
    contents: &'a [Vec<u8>],
    parts: Vec<Part>,
}

impl<'a> Worker<'a> {
    /// Creates a worker with a part of each of `common`, and with a lease of its own in each group.
    pub fn new(
        thread: usize,
        seed: u64,
        store: &Store,
        common: &[Arc<Lease>],
        contents: &'a [Vec<u8>],
    ) -> Self {
        let part = |(number, lease): (usize, &Arc<Lease>)| {
            Part::new(Arc::clone(lease), GROUPS[number / COMMON], thread * PAGES)
        };
        let mut parts: Vec<_> = common.iter().enumerate().map(part).collect();
        parts.extend(GROUPS.map(|group| own_part(store, group)));
        Self { random: Random(seed << 8 | thread as u64), contents, parts }
    }

    pub fn run(&mut self, store: &Store, operations: u64) {
        for _ in 0..operations {
            self.one(store);
        }
    }

    fn one(&mut self, store: &Store) {
        let random = &mut self.random;
        let which = random.below(self.parts.len() as u64) as usize;
        let part = &mut self.parts[which];
        let page = random.below(PAGES as u64) as usize;
        let content = &self.contents[random.below(self.contents.len() as u64) as usize];
        let at = random.below(PAGE_SIZE as u64) as usize;
        let length = 1 + random.below((PAGE_SIZE - at) as u64) as usize;
        let offset = part.offset(page);
        match random.below(100) {
            0..40 => {
                part.lease().write(offset, content).unwrap();
                part.model.write(page, 0, content);
            }
            40..52 => {
                part.lease().write(offset + at as u64, &content[at..at + length]).unwrap();
                part.model.write(page, at, &content[at..at + length]);
            }
            52..60 => {
                let count = (1 + random.below(8) as usize).min(PAGES - page);
                let data: Vec<u8> =
                    content.iter().copied().cycle().take(count * PAGE_SIZE).collect();
                part.lease().write(offset, &data).unwrap();
                (page..page + count).for_each(|page| part.model.write(page, 0, content));
            }
            60..68 => {
                part.lease().discard(offset, PAGE_SIZE as u64).unwrap();
                part.model.discard(page, 0, PAGE_SIZE);
            }
            68..72 => {
                part.lease().discard(offset + at as u64, length as u64).unwrap();
                part.model.discard(page, at, length);
            }
            72..74 => {
                part.lease().allocate_zeroes(offset, PAGE_SIZE as u64).unwrap();
                part.model.allocate_zeroes(page, 0, PAGE_SIZE);
            }
            74..76 => {
                part.lease().allocate_zeroes(offset + at as u64, length as u64).unwrap();
                part.model.allocate_zeroes(page, at, length);
            }
            76..79 => {
                // Content that no other page has.
                let mut unique = content.clone();
                random.fill(&mut unique[..64]);
                part.lease().write(offset, &unique).unwrap();
                part.model.write(page, 0, &unique);
            }
            79..90 => {
                let mut bytes = vec![0xAA; length];
                part.lease().read(offset + at as u64, &mut bytes).unwrap();
                assert!(
                    bytes == part.model.content(page)[at..at + length],
                    "page {page} of {}",
                    part.id
                );
            }
            // Rarely, because it removes all pages of the lease.
            90 if which >= 2 * COMMON && random.below(20) == 0 => {
                store.remove(part.id).unwrap();
                *part = own_part(store, part.group);
            }
            _ => {
                let count = (1 + random.below(8) as usize).min(PAGES - page);
                if let Some(held) =
                    part.lease().try_hold(offset, (count * PAGE_SIZE) as u64).unwrap()
                {
                    let expected: Vec<u8> =
                        (page..page + count).flat_map(|page| part.model.content(page)).collect();
                    let mut seen = 0;
                    for segment in held.segments() {
                        match segment {
                            Segment::Data(data) => {
                                assert!(data == &expected[seen..seen + data.len()]);
                                seen += data.len();
                            }
                            Segment::Hole(length) => seen += length,
                        }
                    }
                    assert_eq!(seen, expected.len());
                }
            }
        }
    }

    /// Compares every page with the model.
    pub fn check(&self) {
        let mut bytes = vec![0; PAGE_SIZE];
        for part in &self.parts {
            for page in 0..PAGES {
                part.lease().read(part.offset(page), &mut bytes).unwrap();
                assert!(bytes == part.model.content(page), "page {page} of {}", part.id);
                let stored =
                    part.lease().block_status(part.offset(page), PAGE_SIZE as u64).unwrap();
                assert!(
                    stored.eq([Run {
                        length: PAGE_SIZE as u64,
                        stored: part.model.0[page].is_some()
                    }])
                );
            }
        }
    }

    /// Returns the stored contents with the group of each.
    pub fn stored(&self) -> impl Iterator<Item = (&'static str, &[u8])> {
        let of_part = |part: &'_ Part| part.group;
        self.parts.iter().flat_map(move |part| {
            part.model.0.iter().flatten().map(move |page| (of_part(part), page.as_slice()))
        })
    }

    /// Drops its leases so that the store can close.
    pub fn let_go(&mut self) {
        self.parts.iter_mut().for_each(|part| part.lease = None);
    }

    pub fn find_again(&mut self, store: &Store) {
        self.parts.iter_mut().for_each(|part| part.lease = Some(store.get(part.id).unwrap()));
    }

    /// Picks one of the leases in which every thread has a part.
    pub fn any_common(&self, random: &mut Random) -> (usize, &'static str) {
        let which = random.below(2 * COMMON as u64) as usize;
        (which, self.parts[which].group)
    }

    pub fn id(&self, which: usize) -> LeaseId {
        self.parts[which].id
    }

    /// Replaces a removed lease by a new one.
    pub fn replace(&mut self, which: usize, lease: Arc<Lease>) {
        let part = &mut self.parts[which];
        *part = Part::new(lease, part.group, part.base);
    }
}

fn own_part(store: &Store, group: &'static str) -> Part {
    let capacity = Bytes((PAGES * PAGE_SIZE) as u64);
    Part::new(store.create(shared_record(group, capacity)).unwrap(), group, 0)
}
