//! Hand-overs to another host, which fail if an engine dies.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use aquifer_region_client::Run;

use super::super::Engine;
use super::super::incoming::Incoming;
use super::world::{Host, World, expect, unless_killed};
use crate::handover::{Frame, Round};

impl World {
    /// Hands the region over. Pages left behind follow later.
    pub(super) fn migrate(&self) {
        // Each host has second copies of its own, so the leases must have all pages.
        if self.shape.copies {
            self.mend();
        }
        let kind = if self.one_in(3) { Round::Clean } else { Round::Copy };
        let rounds = vec![kind; self.below(4) as usize];
        let last = if self.one_in(2) { Round::Leave } else { Round::Last };
        self.migrate_by(&rounds, last, || (0..self.below(8)).for_each(|_| self.act()));
    }

    /// Does the same by these rounds, and calls `between` after each.
    pub(super) fn migrate_by(&self, rounds: &[Round], last: Round, between: impl Fn()) {
        let (from, to) = (self.host(), self.new_host());
        if !self.prepare(&from, &to) {
            return self.stay_here(&from);
        }
        let mut incoming = Incoming::default();
        for round in rounds {
            if !self.round(&from, &to, &mut incoming, *round) {
                return self.stay_here(&from);
            }
            between();
        }
        self.schedule.still.set(true);
        if !self.round(&from, &to, &mut incoming, last) {
            return self.stay_here(&from);
        }
        // QEMU saves a device, which writes to memory.
        (0..self.below(3)).for_each(|_| self.touch(&from, self.below(self.shape.pages), true));
        // An engine that was started meanwhile does not know which pages were sent.
        let goes_on = from.engine.borrow().as_ref().is_some_and(|engine| engine.is_being_sent());
        if !goes_on || !self.round(&from, &to, &mut incoming, Round::Rest) {
            return self.stay_here(&from);
        }
        self.give(&from, &to);
    }

    fn prepare(&self, from: &Rc<Host>, to: &Rc<Host>) -> bool {
        // The region stays foreign to the destination until the end of the hand-over.
        self.restart(to);
        match self.run(from, "begin to hand over", Engine::begin_outgoing) {
            Some(begun) => expect("begin", begun),
            None => return false,
        }
        true
    }

    /// Does a round. Returns false if either engine died.
    fn round(&self, from: &Rc<Host>, to: &Rc<Host>, incoming: &mut Incoming, round: Round) -> bool {
        let goes_on = from.engine.borrow().as_ref().is_some_and(|engine| engine.is_being_sent());
        if !goes_on {
            return false;
        }
        let mut there = true;
        let done = self.run(from, format_args!("{round:?}"), |engine| {
            engine.round(round, &mut |frame, data| {
                let taken = self.take_in(to, incoming, frame, data);
                there &= taken.is_ok();
                taken
            })
        });
        match done {
            Some(Err(_)) if !there => false,
            Some(done) => {
                expect("a round", done);
                true
            }
            None => false,
        }
    }

    /// Passes a frame to the destination engine, which may be killed by it.
    fn take_in(
        &self,
        to: &Rc<Host>,
        incoming: &mut Incoming,
        frame: &Frame,
        data: &[u8],
    ) -> io::Result<()> {
        let Some(engine) = to.engine.borrow().clone() else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        let before = self.running.replace(Some(to.clone()));
        let taken = catch_unwind(AssertUnwindSafe(|| match frame {
            Frame::Leases => {
                self.take_leases(to, &engine);
                Ok(())
            }
            frame => engine.take_in(incoming, frame, data),
        }));
        self.running.replace(before);
        match unless_killed(taken) {
            Some(taken) => expect("take in", taken),
            None => {
                self.lose_engine(to);
                return Err(io::ErrorKind::BrokenPipe.into());
            }
        }
        Ok(())
    }

    fn stay_here(&self, from: &Rc<Host>) {
        self.say("it stays here");
        self.schedule.still.set(false);
        match self.run_if_there(from, "own", Engine::own) {
            Some(()) => {}
            None => self.restart(from),
        }
    }

    fn run_if_there<T>(
        &self,
        host: &Rc<Host>,
        what: &str,
        op: impl FnOnce(&Engine) -> T,
    ) -> Option<T> {
        host.engine.borrow().is_some().then_some(())?;
        self.run(host, what, op)
    }

    /// Gives the region to the other host, whichever engine dies.
    fn give(&self, from: &Rc<Host>, to: &Rc<Host>) {
        self.say("it is given away");
        from.foreign.set(true);
        self.own(to);
        for host in [from, to] {
            if self.one_in(6) {
                // The destination may die before it learns that it owns the region.
                to.foreign.set(true);
                self.restart(host);
            }
        }
        to.foreign.set(false);
        if self.run_if_there(to, "own", Engine::own).is_none() {
            self.restart(to);
        }
        self.schedule.still.set(false);
        *self.here.borrow_mut() = to.clone();
        self.start_program(to);
        self.other.replace(Some(from.clone()));
    }

    /// Fetches pages that were left behind: those that threads wait for, or the next ones. Returns
    /// true if none is left.
    pub(super) fn fetch_postcopy(&self, all: bool) -> bool {
        let Some(from) = self.other.borrow().clone() else { return true };
        let to = self.host();
        if from.engine.borrow().is_none() || self.one_in(20) {
            self.restart(&from);
        }
        let mut cursor = self.below(self.shape.pages);
        let next = self.run(&to, "what is to come next", |engine| {
            engine.next_postcopy(all.then_some(&mut cursor))
        });
        let Some(next) = next else {
            self.restart(&to);
            return false;
        };
        let next = expect("what is next", next);
        if next.is_empty() {
            if all {
                self.say("all has come");
                self.remove_copies(&from);
                self.other.replace(None);
            }
            return all;
        }
        self.bring(&from, &to, &next);
        false
    }

    fn bring(&self, from: &Rc<Host>, to: &Rc<Host>, runs: &[Run]) {
        let mut incoming = Incoming::default();
        let done = self.run(from, format_args!("send {runs:?}"), |engine| {
            engine.send_postcopy(runs, &mut |frame, data| {
                self.take_in(to, &mut incoming, frame, data)
            })
        });
        if to.engine.borrow().is_none() {
            return self.restart(to);
        }
        match done {
            Some(sent) => expect("send what was left", sent),
            None => self.restart(from),
        }
    }
}

impl Engine {
    pub(super) fn is_being_sent(&self) -> bool {
        crate::lock(&self.cache).outgoing.is_some()
    }
}
