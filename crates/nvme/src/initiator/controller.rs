//! The controller of a session, and its queues.

use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_page::lock;
use aquifer_page::visitor::Visitor;
use aquifer_transport::channel::{Channel, Socket};
use aquifer_transport::initiating::Deadline;

use super::connect::{Queue, connect};
use super::execute::Executor;
use super::facts::{self, Facts};
use super::link::Link;
use super::{Failure, Target, keep_alive};
use crate::proto::fabrics::ANY_CONTROLLER;

/// Entries of the admin queue, which has one command in flight.
const ADMIN_ENTRIES: u32 = 32;

/// A controller made by this host: its admin queue, kept alive by a sleeping thread, and the
/// numbers of its I/O queues.
///
/// When any of its queues breaks, all its connections end; the target does the same when the admin
/// queue breaks. So the target carries out no command of this controller after later commands on a
/// new controller.
pub(super) struct Controller {
    id: u16,
    /// The epoch of the visitor for which it was made; 0 without a visitor.
    pub(super) epoch: u64,
    pub(super) facts: Facts,
    queues: Arc<Queues>,
    admin_thread: Option<JoinHandle<()>>,
}

/// The connections of a controller.
pub(super) struct Queues {
    open: Mutex<Open>,
}

struct Open {
    ended: bool,
    admin: Socket,
    /// The number that was assigned last.
    last: u16,
    /// The I/O queues; the socket is `None` until the queue is connected.
    queues: Vec<(u16, Option<Socket>)>,
}

impl Controller {
    pub(super) fn connect(
        target: &Target,
        visitor: Option<&Visitor>,
        deadline: Deadline,
    ) -> Result<Self, Failure> {
        let keep_alive = target.keep_alive;
        let queue =
            Queue { controller: ANY_CONTROLLER, number: 0, size: ADMIN_ENTRIES, keep_alive };
        let (mut link, id) = connect(target, queue, deadline)?;
        let facts = facts::start(&mut Executor::new(&mut link, deadline), target, visitor)?;
        let admin = link.socket.try_clone().map_err(Failure::Connect)?;
        let queues = Arc::new(Queues::new(admin));
        let alive = facts.keep_alive && !keep_alive.is_zero();
        let interval = alive.then_some(keep_alive / 3);
        let admin_thread =
            keep_alive::start(link, interval, Arc::clone(&queues)).map_err(Failure::Connect)?;
        let epoch = visitor.map_or(0, |visitor| visitor.epoch);
        Ok(Self { id, epoch, facts, queues, admin_thread: Some(admin_thread) })
    }

    /// Returns whether its queues can still be used.
    pub(super) fn is_alive(&self) -> bool {
        !self.queues.locked().ended
    }

    /// Ends all queues, and so wakes the threads that wait for answers on them.
    pub(super) fn end(&self) {
        self.queues.end();
    }

    /// Connects one more I/O queue and returns its number. The caller MUST call
    /// [`leave`](Self::leave) when the queue ends.
    pub(super) fn join(&self, target: &Target, deadline: Deadline) -> Result<(Link, u16), Failure> {
        let number = self.queues.reserve(self.facts.limits.queues)?;
        let queue = Queue {
            controller: self.id,
            number,
            size: self.facts.limits.queue_size,
            keep_alive: Duration::ZERO,
        };
        let joined = connect(target, queue, deadline)
            .and_then(|(link, _)| self.queues.register(number, &link).map(|()| link));
        match joined {
            Ok(link) => Ok((link, number)),
            Err(failure) => {
                self.leave(number);
                Err(failure)
            }
        }
    }

    /// Frees the number of an I/O queue that has ended.
    pub(super) fn leave(&self, number: u16) {
        self.queues.locked().queues.retain(|(other, _)| *other != number);
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.queues.part();
        self.end();
        if let Some(admin_thread) = self.admin_thread.take() {
            // The panic hook has reported any panic of that thread.
            let _ = admin_thread.join();
        }
    }
}

impl Queues {
    fn new(admin: Socket) -> Self {
        Self { open: Mutex::new(Open { ended: false, admin, last: 0, queues: Vec::new() }) }
    }

    /// Reserves a free number, the one unused for longest: the target may not have seen the old
    /// queue's end yet.
    fn reserve(&self, most: u16) -> Result<u16, Failure> {
        let mut open = self.locked();
        if open.ended {
            return Err(Failure::Broken);
        }
        let after =
            (0..most).map(|step| (u32::from(open.last) + u32::from(step)) % u32::from(most) + 1);
        let is_free = |number: &u16| open.queues.iter().all(|(other, _)| other != number);
        let free = after.map(|number| number as u16).find(is_free);
        let Some(number) = free else {
            return Err(Failure::Refused(format!(
                "its controllers have at most {most} I/O queues"
            )));
        };
        open.last = number;
        open.queues.push((number, None));
        Ok(number)
    }

    fn register(&self, number: u16, link: &Link) -> Result<(), Failure> {
        let socket = link.socket.try_clone().map_err(Failure::Connect)?;
        let mut open = self.locked();
        if open.ended {
            return Err(Failure::Broken);
        }
        if let Some((_, place)) = open.queues.iter_mut().find(|(other, _)| *other == number) {
            *place = Some(socket);
        }
        Ok(())
    }

    /// Lets the admin queue close with a FIN, unless the controller has ended.
    fn part(&self) {
        let open = self.locked();
        if !open.ended {
            // If the call fails, the target sees a reset instead of a FIN.
            let _ = open.admin.set_abortive(false);
        }
    }

    pub(super) fn end(&self) {
        let mut open = self.locked();
        open.ended = true;
        for socket in
            open.queues.iter().filter_map(|(_, socket)| socket.as_ref()).chain([&open.admin])
        {
            // A socket that fails to shut down has already ended.
            let _ = socket.shutdown();
        }
    }

    fn locked(&self) -> MutexGuard<'_, Open> {
        // Every change is a single assignment, push or removal, so a panic leaves no partial
        // change.
        lock(&self.open)
    }
}
