//! The local caches of regions whose size this host's agent chooses.
//!
//! Such a region begins in the RAM of this host as a whole, without a lender. When the host is
//! overloaded, and has lent nothing that it could recall, its largest cache shrinks: cold pages go
//! to lenders, and the region's programs run on. So do caches while a recall takes long. That comes
//! before a loan to swap to, and long before a VM moves. Before pages leave, this host borrows for
//! them (see [`RegionMemory::wants`]). When the host has room again, the cache
//! that fetches most grows, and a lease that is not needed any more goes back. If a lender asks for
//! its memory, and no other host has room, the cache grows, so that the pages come home.
//!
//! A cache shrinks above T_upper and grows below T_lower, and rests in between, so the two do not
//! fight. One cache changes at a time.

use std::collections::BTreeMap;
use std::time::Duration;

use aquifer_page::{Bytes, RegionName, VolumeId};

use super::Node;
use super::offers::Waiting;
use crate::ledger::{AutoCache, Claim, Purpose, RegionMemory};
use crate::{Decision, Memory, RegionRequest, Subject, What};

/// The least share of a region that its cache keeps. Below it, most programs do little but wait.
const LEAST_SHARE: f64 = 0.25;

/// How far a cache shrinks at least in one step.
const LEAST_STEP: Bytes = Bytes::mib(16);

/// The share of M_t that goes if programs wait for memory, although M_u is below the target.
const UNDER_PRESSURE: f64 = 1.0 / 32.0;

/// The shortest time between two steps if programs wait for memory, although M_u is below the
/// target, and from a step to a growth for a lender that waits.
const SETTLING: Duration = Duration::from_secs(5);

/// How long a region rests after its cache could not change, or nobody lent to it.
const RETRY: Duration = Duration::from_secs(60);

/// The longest wait for a loan. The agent that should have told its end did not.
const LOAN: Duration = Duration::from_secs(180);

/// How long an overloaded lender only recalls. Then its caches shrink too.
const RECALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Time from one growth to the next, and from the last shrinking to a growth.
const GROWTH: Duration = Duration::from_secs(30);

/// The fetched pages in that time from which on a region needs more cache.
const FETCHES: u64 = 256;

/// The least loan for a region that has no lease, or too little: a share of its size. With less,
/// it would borrow from many lenders in turn.
pub(super) const LEAST_LOAN: f64 = 1.0 / 16.0;

/// What the node remembers of caches.
#[derive(Clone, Debug, Default)]
pub(super) struct Caches {
    /// The region whose cache changes now.
    changing: Option<RegionName>,
    /// The loan that this host asks others for.
    pub(super) loan: Option<Loan>,
    /// When each region's cache could not change.
    failed: BTreeMap<RegionName, Duration>,
    /// When a cache last shrank, or grew.
    pub(super) changed: Option<Duration>,
    /// When leases last came, when one was last given back, or when the node began to look.
    pub(super) leases_changed: Option<Duration>,
    /// When this host last asked for memory for each region's spilled pages, and how many there
    /// were.
    pub(super) spill_asked: BTreeMap<RegionName, (Duration, Bytes)>,
    /// When the node last compared the fetches, and the fetches then.
    looked: Duration,
    fetched: BTreeMap<RegionName, u64>,
}

/// A loan for a region.
#[derive(Clone, Debug)]
pub(super) struct Loan {
    pub(super) region: RegionName,
    pub(super) volume: VolumeId,
    /// When it began.
    pub(super) since: Duration,
    /// It is for pages in the region's spill file, and not for a cache that shrinks.
    pub(super) for_spilled: bool,
}

impl Caches {
    /// Returns whether this host borrows for a region.
    pub(super) fn is_borrowing(&self) -> bool {
        self.loan.is_some()
    }
}

/// A cache that can shrink.
#[derive(Clone, Copy, Debug)]
struct Candidate<'a> {
    region: &'a RegionMemory,
    auto: AutoCache,
    /// The RAM above the least that it keeps.
    frees: Bytes,
}

impl Candidate<'_> {
    fn text(&self) -> String {
        format!("{} could free {}", self.region.name, self.frees)
    }
}

impl Node {
    /// Shrinks a cache if this host is overloaded, or grows one if there is room for it. Gives back
    /// what regions do not need.
    pub(super) fn size_caches(&mut self) {
        let (config, memory) = (&self.controller.facts().config, self.own.memory);
        let overloaded = memory.overloaded(config);
        let over = self.own.caches.loan.as_ref().is_some_and(|loan| self.passed(LOAN, loan.since));
        if over {
            self.end_loan("the loan did not end in time".to_owned());
        }
        // A lender recalls first, but its caches do not wait for a borrower that has nowhere to go.
        let mut since = self.moves.overloaded.into_iter().chain(self.controller.recalling_since());
        let is_late = since.any(|since| self.passed(RECALL_TIMEOUT, since));
        let gives = overloaded && (self.controller.lent().is_empty() || is_late);
        let chosen = if gives { self.largest() } else { None };
        let relieves = gives && (chosen.is_some() || self.is_busy());
        self.controller.note_relief(relieves);
        if self.is_busy() || self.belonging.has_left {
            return;
        }
        if let Some((chosen, others)) = chosen {
            self.shrink(chosen, &others);
        } else if !overloaded {
            self.grow_for_lenders();
            self.grow();
            self.return_spilled();
            self.give_back_surplus();
        }
    }

    /// Returns whether a cache changes, or is about to. A loan for spilled pages holds up nothing.
    pub(super) fn is_busy(&self) -> bool {
        let for_cache = |loan: &Loan| !loan.for_spilled;
        self.own.caches.changing.is_some() || self.own.caches.loan.as_ref().is_some_and(for_cache)
    }

    pub(super) fn autos(&self) -> impl Iterator<Item = (&RegionMemory, AutoCache)> {
        let regions = self.own.read.regions.iter();
        regions.filter_map(|region| Some((region, region.auto?)))
    }

    pub(super) fn rests(&self, region: &RegionName) -> bool {
        self.own.caches.failed.get(region).is_some_and(|at| !self.passed(RETRY, *at))
    }

    /// Returns the cache that frees most, and a text about the others.
    fn largest(&self) -> Option<(Chosen, Vec<String>)> {
        let (mut candidates, mut others) = (Vec::new(), Vec::new());
        for (region, auto) in self.autos() {
            let least = region.in_use().scaled(LEAST_SHARE);
            let frees = region.resident.min(region.cache).saturating_sub(least);
            let name = &region.name;
            if self.rests(name) {
                others.push(format!("{name} could not change lately"));
            } else if frees < LEAST_STEP {
                others.push(format!("{name} keeps its last {least}"));
            } else if auto.leased < self.held(auto.volume) {
                // The reading is older than the lease.
                others.push(format!("{name} has only {} at lenders", auto.leased));
            } else {
                candidates.push(Candidate { region, auto, frees });
            }
        }
        let most = |one: &&Candidate<'_>| (one.frees, std::cmp::Reverse(one.region.name.clone()));
        let best = candidates.iter().max_by_key(most)?;
        let beaten = candidates.iter().filter(|one| one.region.name != best.region.name);
        let others = beaten.map(Candidate::text).chain(others).collect();
        let chosen = Chosen { region: best.region.clone(), auto: best.auto, frees: best.frees };
        Some((chosen, others))
    }

    fn shrink(&mut self, chosen: Chosen, others: &[String]) {
        let (memory, target) = (self.own.memory, self.target());
        let excess = memory.used.saturating_sub(target);
        // The kernel's signal looks back on some seconds.
        let acted = self.own.caches.changed.is_some_and(|at| !self.passed(SETTLING, at));
        if excess == Bytes::ZERO && acted {
            return;
        }
        let needed = excess.max(memory.total.scaled(UNDER_PRESSURE)).max(LEAST_STEP);
        let Chosen { region, auto, frees } = chosen;
        let (name, frees) = (region.name.clone(), frees.min(needed));
        let is = match memory.pressure && excess == Bytes::ZERO {
            true => format!("programs wait for memory at used {}", memory.used),
            false => format!("used {} is {excess} above the target {target}", memory.used),
        };
        let others = match others.is_empty() {
            true => "it is the only cache that may".to_owned(),
            false => format!("the others: {}", others.join("; ")),
        };
        let about = vec![Subject::Region(name.clone()), Subject::Vm(name.clone())];
        // The last step may not be done.
        let wanted = match region.resident > region.cache + LEAST_STEP {
            true => region.cache,
            false => region.resident.min(region.cache).saturating_sub(frees),
        };
        let leased = self.keeps(auto);
        let cache = wanted.max(self.least_cache(&region, leased));
        if cache > wanted && region.resident.min(region.cache) < cache + LEAST_STEP {
            // Memory that was never touched is outside the cache, too.
            let least = cache.min(region.resident).min(region.cache).saturating_sub(LEAST_STEP);
            let least = self.needs(&region, least);
            let most = self.wants(&region, Bytes::ZERO).saturating_sub(leased);
            let bytes = self.wants(&region, wanted).saturating_sub(leased);
            let bytes = bytes.max(region.size.scaled(LEAST_LOAN)).min(most);
            let least = least.saturating_sub(leased).min(bytes);
            self.log(
                format!("borrows {bytes} for region {name}, to shrink its cache: {is}"),
                about,
            );
            let (volume, group) = (auto.volume, region.group);
            let request = RegionRequest { region: name, volume, bytes, least, group };
            return self.ask_for_loan(request, false);
        }
        self.log(format!("shrinks the cache of region {name} to {cache}: {is}; {others}"), about);
        self.change(name, cache);
    }

    pub(super) fn ask_for_loan(&mut self, request: RegionRequest, for_spilled: bool) {
        let (region, volume) = (request.region.clone(), request.volume);
        self.own.caches.loan = Some(Loan { region, volume, since: self.now, for_spilled });
        self.with_offers(Waiting::BorrowFor(request));
    }

    pub(super) fn change(&mut self, region: RegionName, cache: Bytes) {
        self.own.caches.changing = Some(region.clone());
        self.own.caches.changed = Some(self.now);
        self.outputs.push(super::Output::SetCache { region, cache });
    }

    /// Grows the cache of a region, if its lender waits for memory that no other host takes. Then
    /// the engine brings the pages home.
    fn grow_for_lenders(&mut self) {
        let acted = self.own.caches.changed.is_some_and(|at| !self.passed(SETTLING, at));
        if acted || self.is_busy() {
            return;
        }
        let stuck = self.controller.stuck(self.now);
        let needs = |(region, cache): &(&RegionMemory, Bytes)| {
            region.in_use().min(*cache).saturating_sub(region.resident)
        };
        // Each with the size of the cache that can do without the lease.
        let stuck = || {
            self.autos().filter_map(|(region, auto)| {
                let others = *stuck.get(&auto.volume)?;
                Some((region, self.least_cache(region, others)))
            })
        };
        let fits = |(region, cache): &(&RegionMemory, Bytes)| region.cache >= *cache;
        // Pages that are about to come home.
        let comes = stuck().filter(fits).map(|it| needs(&it)).sum();
        let room = self.target().saturating_sub(self.taken()).saturating_sub(comes);
        let may_grow =
            stuck().filter(|it| !fits(it) && needs(it) <= room && !self.rests(&it.0.name));
        let mut may_grow: Vec<_> = may_grow.map(|it| (needs(&it), it.0.clone(), it.1)).collect();
        may_grow.sort_by_key(|(needs, region, _)| (*needs, region.name.clone()));
        for (_, region, cache) in may_grow {
            if self.is_busy() {
                return;
            }
            let what = format!(
                "grows the cache of region {} to {cache}, so that its pages come home: its lender \
                 waits for them, no other host has room, and {room} are free here below the middle \
                 of T_lower and T_upper",
                region.name
            );
            self.grow_to(region, cache, what);
        }
    }

    /// Returns the use of memory to which caches shrink: the middle of T_lower and T_upper.
    fn target(&self) -> Bytes {
        let (config, memory) = (&self.controller.facts().config, self.own.memory);
        (memory.upper(config) + memory.lower(config)).scaled(0.5)
    }

    /// Returns the memory in use, with what may come back from swap, or into leases.
    fn taken(&self) -> Bytes {
        let lent = self.controller.lent_sums();
        let may_come = lent.granted.saturating_sub(lent.stored);
        let Memory { used, swap_used, .. } = self.own.memory;
        used.saturating_add(swap_used).saturating_add(may_come)
    }

    /// Grows a cache if that breaks no promise.
    fn grow_to(&mut self, region: RegionMemory, cache: Bytes, what: String) {
        let RegionMemory { name, group, .. } = region;
        let claim = Claim {
            name: name.clone(),
            purpose: Purpose::Cache,
            group,
            bytes: cache,
            reserve: Bytes::ZERO,
        };
        // If the operator promised more than M_t, only use tells whether there is room.
        let is_overcommitted = self.ledger().promised_too_much() > Bytes::ZERO;
        if !is_overcommitted && !matches!(self.shortage(&claim), Ok(None)) {
            return;
        }
        self.own.claims.note(claim, self.now);
        self.note_claims();
        self.log(what, vec![Subject::Region(name.clone()), Subject::Vm(name.clone())]);
        self.change(name, cache);
    }

    /// Grows the cache that fetched most since the last look, if this host has room below T_lower.
    fn grow(&mut self) {
        if !self.passed(GROWTH, self.own.caches.looked) {
            return;
        }
        self.own.caches.looked = self.now;
        let fetched: BTreeMap<_, _> =
            self.autos().map(|(region, auto)| (region.name.clone(), auto.fetched)).collect();
        let before = std::mem::replace(&mut self.own.caches.fetched, fetched);
        let rests = self.own.caches.changed.is_some_and(|at| !self.passed(GROWTH, at));
        let lower = self.own.memory.lower(&self.controller.facts().config);
        let room = lower.saturating_sub(self.taken());
        let wants = |(region, auto): (&RegionMemory, AutoCache)| {
            let before = before.get(&region.name)?;
            let fetched = auto.fetched.checked_sub(*before)?;
            let may = region.cache < region.size && !self.rests(&region.name);
            (may && fetched >= FETCHES).then(|| (fetched, region.clone()))
        };
        let all: Vec<_> = self.autos().filter_map(wants).collect();
        let most = all
            .into_iter()
            .max_by_key(|(fetched, region)| (*fetched, std::cmp::Reverse(region.name.clone())));
        let Some((fetched, region)) = most.filter(|_| !rests) else { return };
        let lacks = region.size.saturating_sub(region.cache);
        let step = region.in_use().scaled(0.125).max(LEAST_STEP).min(lacks);
        let cache = region.cache + step;
        // Half of the room stays, as others may need it in the same moment.
        if step > room.scaled(0.5) || self.is_busy() {
            return;
        }
        let what = format!(
            "grows the cache of region {} to {cache}: it fetched {fetched} pages in {} s, and \
             {room} are free below T_lower",
            region.name,
            GROWTH.as_secs()
        );
        self.grow_to(region, cache, what);
    }

    /// Notes that a cache has its new size, or why not.
    pub(super) fn cache_set(&mut self, region: &RegionName, failed: Option<String>) {
        if self.own.caches.changing.take_if(|changing| changing == region).is_none() {
            return;
        }
        self.own.caches.changed = Some(self.now);
        if let Some(why) = failed {
            self.own.claims.take(Purpose::Cache, region);
            self.note_claims();
            self.give_up(region.clone(), &why);
        }
    }

    /// Notes that a loan for a region has failed.
    pub(super) fn note_loan(&mut self, decision: &Decision) {
        let Some(ours) = self.own.caches.loan.as_ref().map(|loan| loan.volume) else { return };
        match &decision.what {
            What::Lacks { volume, .. } if *volume == ours => {
                self.end_loan("other hosts do not lend enough".to_owned());
            }
            What::Unclaimed { volume, why, .. } if *volume == ours => self.end_loan(why.clone()),
            _ => {}
        }
    }

    /// Notes that the region has its leases.
    pub(super) fn loan_arrived(&mut self, volume: VolumeId) {
        self.own.caches.loan.take_if(|loan| loan.volume == volume);
    }

    fn end_loan(&mut self, why: String) {
        match self.own.caches.loan.take() {
            Some(loan) if loan.for_spilled => self.keep_spilled(loan.region, &why),
            Some(loan) => self.give_up(loan.region, &why),
            None => {}
        }
    }

    fn give_up(&mut self, region: RegionName, why: &str) {
        let about = vec![Subject::Region(region.clone()), Subject::Vm(region.clone())];
        let rest = RETRY.as_secs();
        self.log(
            format!("cannot change the cache of region {region}, tries again in {rest} s: {why}"),
            about,
        );
        self.own.caches.failed.insert(region, self.now);
    }
}

/// The cache that shrinks.
#[derive(Clone, Debug)]
struct Chosen {
    region: RegionMemory,
    auto: AutoCache,
    frees: Bytes,
}
