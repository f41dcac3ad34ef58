//! Faults that wait at the same time. One worker fetches the pages of many together, so that they
//! are in flight together although workers are few.

use aquifer_page::{PAGE_SIZE, WorkerId};
use rustix::event::epoll;

use super::Engine;
use super::fault::{FaultRequest, GUARD};
use crate::file::runs;
use crate::lock;
use crate::table::{Page, Place};

/// The most faults whose pages a worker fetches together. The first page waits for the last.
const TOGETHER: usize = 16;

impl Engine {
    /// Waits for a fault, and takes it from the queue. If a lender has its page, also takes the
    /// faults on pages that come with one request. It takes the first alone if two lenders have its
    /// page, as a read by itself does not wait for a late one. Returns none after a signal, or at
    /// the end.
    pub(super) fn next_faults(&self) -> Vec<FaultRequest> {
        let is_empty = lock(&self.faults.queue).is_empty();
        if is_empty {
            self.wait_for_faults();
        }
        let mut queue = lock(&self.faults.queue);
        let some = usize::from(!queue.is_empty());
        let mut taken: Vec<_> = queue.drain(..some).collect();
        let Some(first) =
            taken.first().filter(|first| !queue.is_empty() && self.is_remote(first.page))
        else {
            return taken;
        };
        let first = first.page;
        let has_a_choice = self.lenders.volume.has_a_choice(first * PAGE_SIZE as u64);
        // A fault without a free frame may wait for an eviction, and another worker can serve it.
        let room = if has_a_choice { 0 } else { lock(&self.cache).free() as usize };
        let comes_too = |other: &mut FaultRequest| {
            self.is_remote(other.page) && self.are_together(first, other.page)
        };
        taken.extend(queue.extract_if(.., comes_too).take(room.clamp(1, TOGETHER) - 1));
        let is_empty = queue.is_empty();
        drop(queue);
        if !is_empty {
            // This worker may wait for the lender without sleeping.
            self.faults.poll_token.pass_on();
        }
        taken
    }

    /// Returns whether one request fetches both pages.
    pub(super) fn are_together(&self, one: u64, other: u64) -> bool {
        let at = |page: u64| page * PAGE_SIZE as u64;
        self.lenders.volume.is_together(at(one), at(other))
    }

    /// Waits until the kernel reports faults, and adds them to the queue.
    fn wait_for_faults(&self) {
        let mut events = Vec::with_capacity(1);
        // An error is an interrupt by a signal, which has no meaning here.
        let _ = epoll::wait(&self.faults.epoll, rustix::buffer::spare_capacity(&mut events), None);
        for event in &events {
            // An event of no known program is the end, or of a program that has just gone.
            let id = event.data.u64();
            let Some(program) = self.program(id & !GUARD) else { continue };
            let faults = if id & GUARD == 0 { &program.userfault } else { &program.guard };
            let requests = faults.faults().into_iter().flatten();
            let requests = requests.filter_map(|fault| FaultRequest::new(&program, fault));
            lock(&self.faults.queue).extend(requests);
        }
    }

    /// Serves faults on pages that one request fetches.
    pub(super) fn serve_together(
        &self,
        worker: WorkerId,
        requests: &[FaultRequest],
        buffer: &mut [u8],
    ) {
        let (mut taken, mut apart) = self.take_together(requests);
        taken.sort_unstable_by_key(|(request, _)| request.page);
        let pages = runs(taken.iter().map(|(request, _)| request.page));
        let mut came = Vec::with_capacity(taken.len());
        if !pages.is_empty() && self.fetch(worker, &pages, buffer).is_ok() {
            for ((request, is), data) in taken.into_iter().zip(buffer.chunks_exact(PAGE_SIZE)) {
                match self.has_fetched(request, is, Ok(data)) {
                    Ok(()) => came.push(request),
                    Err(error) => self.stall(request, &error),
                }
            }
        } else {
            // Each by itself, so that the error is that of the page.
            taken.iter().for_each(|(request, is)| self.abort_fill(request.page, *is));
            apart.extend(taken.into_iter().map(|(request, _)| request));
        }
        apart.into_iter().for_each(|request| self.serve(worker, request, buffer));
        // Nobody waits for these pages.
        came.into_iter().for_each(|request| self.prefetch(worker, request, buffer));
    }

    /// Takes frames for the pages that are still remote, as far as frames are free. Also returns
    /// the other faults.
    fn take_together<'a>(
        &self,
        requests: &'a [FaultRequest],
    ) -> (Vec<(&'a FaultRequest, Page)>, Vec<&'a FaultRequest>) {
        let (mut taken, mut apart) = (Vec::with_capacity(requests.len()), Vec::new());
        let mut cache = lock(&self.cache);
        for request in requests {
            if self.is_remote(request.page) && cache.has_room() {
                let is = self.table.get(request.page);
                self.take(&mut cache, request.page, is, Place::Filling);
                taken.push((request, is));
            } else {
                apart.push(request);
            }
        }
        self.see_to_room(&mut cache);
        drop(cache);
        (taken, apart)
    }
}
