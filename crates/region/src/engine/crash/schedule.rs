//! The random schedules, and the tests that run them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use aquifer_page::{FrameIndex, PageIndex, WorkerId};
use aquifer_region_client::Run;

use super::super::{Engine, Proposal, Scheme};
use super::program::CELLS;
use super::world::{Random, Shape, World, Wrong, expect, wrong};
use crate::effect;
use crate::policy::PolicyKind;

impl World {
    /// Does one step of a program or an operator.
    pub(super) fn act(&self) {
        let host = self.host();
        let page = self.below(self.shape.pages);
        match self.below(32) {
            0..8 => self.touch(&host, page, false),
            8..18 => self.touch(&host, page, true),
            18 => self.discard(page, 1 + self.below(4)),
            19 | 20 => _ = self.persist(),
            23 if self.shape.copies => self.change_copies(),
            21..24 => self.evict(1 + self.below(6)),
            24 => self.read_all(),
            25 => _ = self.fetch_postcopy(true),
            26 if self.one_in(3) => self.end_program(&host),
            27 if host.programs.borrow().len() < 2 && self.one_in(3) => self.start_program(&host),
            28 if self.one_in(3) => self.restart(&host),
            29 => self.drop_entries(page, 1 + self.below(4)),
            30 if self.shape.shares => self.share(page, 1 + self.below(6)),
            31 if self.shape.moves => self.change_leases(),
            _ if self.shape.copies && self.one_in(2) => self.change_copies(),
            _ => self.touch(&host, page, true),
        }
        if host.programs.borrow().is_empty() {
            self.start_program(&host);
        }
        if self.lender.was_trespassed() {
            wrong("a host changed what a lender has of another host's region");
        }
    }

    /// Writes all dirty pages. Returns false if the engine died meanwhile.
    pub(super) fn persist(&self) -> bool {
        let host = self.host();
        let done = self.run(&host, "persist", Engine::persist);
        match &done {
            Some(done) => _ = expect("persist", done.as_ref()),
            None => self.restart(&host),
        }
        done.is_some()
    }

    pub(super) fn evict(&self, count: u64) {
        let host = self.host();
        match self.run(&host, format_args!("evict {count}"), |engine| {
            engine.evict(WorkerId(0), count as usize)
        }) {
            Some(done) => expect("evict", done),
            None => self.restart(&host),
        }
    }

    /// Proposes pages as equal to frames. They are equal, or were at the time of the proposal.
    pub(super) fn share(&self, page: u64, count: u64) {
        let host = self.host();
        let mut proposals = Vec::new();
        for page in page..(page + count).min(self.shape.pages) {
            self.touch(&host, page, false);
            let Some(program) = host.programs.borrow().first().cloned() else { return };
            if program.has(page) && !program.shares(page) {
                // A fresh frame, as no frame may change while a page is mapped from it.
                let frame = self.below(8) * self.shape.pages + page;
                let is_free = !self.frames.borrow().contains(&frame);
                if is_free {
                    self.frames.borrow_mut().insert(frame);
                    host.keep_frame(frame, &program.content(page));
                    let (page, frame) = (PageIndex(page), Some(FrameIndex(frame)));
                    proposals.push(Proposal { page, frame });
                }
            }
        }
        match self
            .run(&host, format_args!("share {proposals:?}"), |engine| engine.share(&proposals))
        {
            Some(merged) => {
                let merged = expect("share", merged);
                self.say(format_args!("  {merged:?}"));
            }
            None => self.restart(&host),
        }
    }

    pub(super) fn drop_entries(&self, page: u64, count: u64) {
        self.say(format_args!("the program drops {count} entries from page {page} on"));
        for program in &*self.host().programs.borrow() {
            (page..(page + count).min(self.shape.pages)).for_each(|page| program.drop_entry(page));
        }
    }

    pub(super) fn discard(&self, page: u64, count: u64) {
        let host = self.host();
        let pages = page..(page + count).min(self.shape.pages);
        for cell in pages.start * CELLS..pages.end * CELLS {
            self.model.cells.borrow_mut()[cell as usize].push(0);
        }
        *self.schedule.discarding.borrow_mut() = pages.clone();
        loop {
            let run = Run { first: pages.start, count: pages.end - pages.start };
            match self.run(&host, format_args!("discard {pages:?}"), |engine| engine.discard(run)) {
                Some(done) => {
                    // A discard is refused during a hand-over.
                    if done.is_ok() {
                        (pages.start * CELLS..pages.end * CELLS).for_each(|cell| {
                            self.model.cells.borrow_mut()[cell as usize] = vec![0]
                        });
                    }
                    break;
                }
                None => self.restart(&host),
            }
            // The program usually repeats the request.
            if self.one_in(4) {
                break;
            }
        }
        *self.schedule.discarding.borrow_mut() = 0..0;
    }

    pub(super) fn evict_all(&self) {
        for _ in 0..self.shape.pages {
            if crate::lock(&self.host().engine().cache).frames > 0 {
                self.evict(16);
            }
        }
    }

    pub(super) fn read_all(&self) {
        let host = self.host();
        (0..self.shape.pages).for_each(|page| self.touch(&host, page, false));
    }

    /// Checks all pages: as they are, after full eviction, or on another host.
    fn check_all(&self) {
        while !self.fetch_postcopy(true) {}
        if self.shape.copies && self.one_in(2) {
            self.mend();
        }
        match self.below(3) {
            0 => {}
            1 => self.evict_all(),
            _ => self.migrate(),
        }
        while !self.fetch_postcopy(true) {}
        self.read_all();
    }
}

/// Seeds up to this one share nothing, and keep their lease and one copy of each page. So the seeds
/// named below keep their schedules.
const SHARES_NOTHING: u64 = 4000;

fn shape(seed: u64, random: &mut Random) -> Shape {
    let (pages, frames) = [(24, 16), (40, 20), (64, 33), (96, 64)][random.below(4) as usize];
    let policy = PolicyKind::ALL[random.below(PolicyKind::ALL.len() as u64) as usize].0;
    let scheme = if random.below(2) == 0 { Scheme::OnDemand } else { Scheme::PreEvict };
    let shares = seed > SHARES_NOTHING && seed % 2 == 1;
    let moves = seed > SHARES_NOTHING && !seed.is_multiple_of(3);
    let copies = seed > SHARES_NOTHING && seed % 5 < 3;
    let lags = seed % 7 < 4;
    Shape { pages, frames, policy, scheme, shares, moves, copies, lags }
}

/// Runs a schedule. On failure returns its log and the reason.
fn run(seed: u64) -> Result<(), String> {
    let mut random = Random::new(seed);
    let shape = shape(seed, &mut random);
    let world = Rc::new(std::cell::RefCell::new(None::<Rc<World>>));
    let made = world.clone();
    let done = catch_unwind(AssertUnwindSafe(move || {
        let world = World::new(shape, random, false);
        *made.borrow_mut() = Some(world.clone());
        let acts = 10 + world.below(40);
        for _ in 0..acts {
            if world.one_in(24) {
                while !world.fetch_postcopy(true) {}
                world.migrate();
            }
            world.act();
        }
        world.check_all();
    }));
    effect::set(None);
    let log =
        world.borrow().as_ref().map(|world| world.log.borrow().join("\n")).unwrap_or_default();
    let told = |what: &str| Err(format!("seed {seed}, {shape:?}\n{log}\n{what}"));
    match done {
        Ok(()) => Ok(()),
        Err(why) => match why.downcast::<Wrong>() {
            Ok(wrong) => told(&wrong.0),
            Err(why) => {
                let panicked = why.downcast_ref::<String>().cloned();
                told(&panicked.unwrap_or_else(|| "a panic".to_owned()))
            }
        },
    }
}

pub(super) fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |number| number.parse().unwrap_or(default))
}

/// Each of these seeds found a lost write with one specific violation of the rule in `dirty.rs`.
#[test]
fn schedules_that_once_lost_writes_lose_none() {
    let armed_before_noted = [35, 1978, 3392];
    let empty_entry_is_clean = [2227, 2575, 2635];
    let given_away_and_discarded = [22, 68, 77];
    let died_without_an_engine = [98, 1977, 3570];
    let all = [
        armed_before_noted,
        empty_entry_is_clean,
        given_away_and_discarded,
        died_without_an_engine,
    ];
    for seed in all.into_iter().flatten() {
        if let Err(what) = run(seed) {
            panic!("{what}");
        }
    }
}

#[test]
fn nothing_is_lost_wherever_an_engine_is_killed() {
    let (first, count) = (number("AQUIFER_SEED", 5000), number("AQUIFER_SCHEDULES", 300));
    for seed in first..first + count {
        if let Err(what) = run(seed) {
            panic!("{what}\nAQUIFER_SEED={seed} AQUIFER_SCHEDULES=1 plays this again");
        }
    }
}
