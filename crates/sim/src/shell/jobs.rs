//! Work that takes time: volumes and leases that start and end, and copies.

use std::time::Duration;

use aquifer_control::node::{Input, Work};
use aquifer_control::{Action, BorrowedLease, Event as Done, LentLease, LiveVolume};
use aquifer_page::{Bytes, LeaseId, VolumeId};
use rand::RngExt as _;

use super::outages::uris;
use crate::event::{Event, HostNumber, JobId};
use crate::invariants::Rule;
use crate::machine::{Copied, Place, Stored, Target, Volume};
use crate::simulation::Simulation;

/// The shortest start of a volume, as a share of the longest.
const LEAST_START: f64 = 0.25;

/// The shortest time to open or free a lease, as a share of the longest.
const LEAST_LEASE: f64 = 0.1;

/// The pause between two looks for a lender that does not answer.
const RETRY: Duration = Duration::from_millis(500);

/// The time of a step of a copy besides its bytes.
const STEP: Duration = Duration::from_millis(1);

/// Work in progress.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    work: Work,
    task: Task,
    /// The number of the agent that ordered it, among those of its host.
    ordered_by: u32,
    /// Whether it has stopped the writes to what it empties.
    has_begun: bool,
    /// Why the work fails, if it does.
    fails: Option<String>,
    /// Since when the copy waits for a lender.
    waits_since: Option<Duration>,
}

#[derive(Clone, Debug)]
enum Task {
    Activate(LiveVolume),
    Extend { volume: VolumeId, unused: Vec<LeaseId> },
    Deactivate(VolumeId),
    Copy { volume: VolumeId, of: LeaseId, onto: BorrowedLease },
    Evacuate { volume: VolumeId, lease: LeaseId, unused: Vec<LeaseId> },
    Open(LentLease),
    Record(LentLease),
    Free(LeaseId),
}

/// What follows a step.
enum Next {
    /// Another step, after this time.
    Step(Duration),
    /// The end, with the event for the agent.
    End(Option<Done>),
}

impl Simulation {
    /// Begins an action that takes time.
    pub(super) fn begin_job(&mut self, host: HostNumber, work: Work, action: Action) {
        let costs = self.scenario.costs;
        let (mut fails, mut has_begun) = (self.draw_failure(), false);
        let (task, wait) = match action {
            Action::Send { .. } => return,
            Action::Activate(live) => {
                (Task::Activate(live), self.time_up_to(costs.start, LEAST_START))
            }
            Action::Extend(LiveVolume { volume, leases, .. }) => {
                let (unused, _) = self.extend(host, volume, leases);
                (Task::Extend { volume, unused }, self.time_up_to(costs.start, LEAST_START))
            }
            Action::Copy { volume, of, onto } => {
                let wait = self.time_up_to(costs.start, LEAST_START);
                (Task::Copy { volume, of, onto }, wait)
            }
            Action::Deactivate { volume } => {
                let refused = self.begin_deactivation(host, volume).err();
                has_begun = refused.is_none();
                fails = refused.or(fails);
                (Task::Deactivate(volume), STEP)
            }
            Action::Evacuate { volume, lease, onto, spills } => {
                let (unused, failed) = self.begin_evacuation(host, volume, (lease, spills), onto);
                has_begun = failed.is_none();
                fails = failed.or(fails);
                (Task::Evacuate { volume, lease, unused }, STEP)
            }
            Action::OpenLease(lent) => {
                self.counts.grants += 1;
                (Task::Open(lent), self.time_up_to(costs.lease, LEAST_LEASE))
            }
            Action::RecordLease(lent) => {
                let most = &mut self.tally.fleet.moves.most_permitted;
                *most = lent.next.len().max(*most);
                (Task::Record(lent), self.time_up_to(costs.lease, LEAST_LEASE))
            }
            Action::FreeLease { lease } => {
                self.check_free(host, lease);
                (Task::Free(lease), self.time_up_to(costs.lease, LEAST_LEASE))
            }
        };
        let job = JobId(self.number());
        let ordered_by = self.hosts[host].starts;
        let new = Job { work, task, ordered_by, has_begun, fails, waits_since: None };
        self.hosts[host].machine.jobs.insert(job, new);
        self.agenda.enter(self.now + wait, Event::JobStep(host, job));
    }

    pub(super) fn draw_failure(&mut self) -> Option<String> {
        let fails = self.rng.random_bool(self.scenario.faults.failures);
        fails.then(|| "the simulation lets it fail".to_owned())
    }

    /// Checks that a lender frees only what no host uses, or what was out of its reach for the
    /// whole grace.
    fn check_free(&mut self, lender: HostNumber, lease: LeaseId) {
        let Some(kept) = self.hosts[lender].machine.store.get_mut(&lease) else { return };
        // The controller repeats an order that failed. The borrower may be back by then.
        if std::mem::replace(&mut kept.is_freeing, true) {
            return;
        }
        // Connections are noted once a period, so the silence may be shorter by that.
        let may_expire = self.now - kept.connected >= self.scenario.config.grace;
        let (users, is_finished) = (kept.users.clone(), kept.is_finished);
        let user = users.into_iter().find(|user| self.holds(*user, lease));
        if let Some(user) = user
            && (is_finished || !may_expire)
        {
            let placed = self.placed(user, lease);
            let name = |host: HostNumber| self.hosts[host].name.clone();
            let (lender_name, borrower) = (name(lender), name(user));
            let rule = Rule::FreedInUse { lender: lender_name, borrower, lease, placed };
            self.violate(rule, &[lender, user]);
        }
    }

    /// Stops writes to a volume, so that swapoff can empty it.
    fn begin_deactivation(&mut self, host: HostNumber, id: VolumeId) -> Result<(), String> {
        let at = &mut self.hosts[host];
        let (Some(volume), Some(agent)) = (at.machine.volumes.get(&id), &at.agent) else {
            return Ok(());
        };
        if volume.is_detaching || volume.places.values().any(|place| place.is_leaving) {
            return Err("its process is moving pages already".to_owned());
        }
        let leaving = agent.node.leaving_with(id);
        let volumes = &at.machine.volumes;
        let held = volumes.iter().filter(|(id, _)| leaving.contains(id)).map(|(_, v)| v.used());
        let others = volumes.iter().filter(|(id, _)| !leaving.contains(id));
        let room = others.map(|(_, volume)| volume.bytes.saturating_sub(volume.used()));
        let back = held.sum::<Bytes>().saturating_sub(room.sum());
        agent.node.fits_without(id, back, &at.machine.reading())?;
        if let Some(volume) = at.machine.volumes.get_mut(&id) {
            volume.is_detaching = true;
        }
        Ok(())
    }

    /// Adds leases to a volume, and stops writes to the one that it leaves. Returns the leases that
    /// do not answer, and why the move cannot begin.
    fn begin_evacuation(
        &mut self,
        host: HostNumber,
        id: VolumeId,
        (lease, spills): (LeaseId, bool),
        onto: Vec<BorrowedLease>,
    ) -> (Vec<LeaseId>, Option<String>) {
        let (unused, added) = self.extend(host, id, onto);
        let at = &mut self.hosts[host];
        let rotates = at.agent.as_ref().is_some_and(|agent| agent.node.rotates(lease));
        let volume = at.machine.volumes.get_mut(&id).filter(|_| added);
        let Some(volume) = volume else {
            return (unused, Some("its process has ended or moves".to_owned()));
        };
        if volume.is_detaching {
            return (unused, Some("its process is moving pages already".to_owned()));
        }
        if rotates && !unused.is_empty() {
            return (unused, Some("the lease for these pages cannot be used".to_owned()));
        }
        if !spills && volume.lacks_without(lease) > Bytes::ZERO {
            return (unused, Some("no other lease has room".to_owned()));
        }
        let under_way = volume
            .places
            .get_mut(&lease)
            .is_some_and(|place| std::mem::replace(&mut place.is_leaving, true));
        (unused, under_way.then(|| "its process is moving these pages already".to_owned()))
    }

    /// Adds leases to a volume. Returns those that could not be added, and whether the volume is
    /// here and takes any.
    fn extend(
        &mut self,
        host: HostNumber,
        id: VolumeId,
        leases: Vec<BorrowedLease>,
    ) -> (Vec<LeaseId>, bool) {
        let lender_of = |lease: &BorrowedLease| self.names[&lease.lender];
        let (added, unused): (Vec<_>, Vec<_>) =
            leases.into_iter().partition(|lease| self.reaches(host, lender_of(lease), lease.lease));
        let places: Vec<_> =
            added.into_iter().map(|lease| Place::new(lease.clone(), lender_of(&lease))).collect();
        let unused: Vec<_> = unused.into_iter().map(|lease| lease.lease).collect();
        let machine = &mut self.hosts[host].machine;
        let is_moving = machine.is_moving(id);
        let volume = machine.volumes.get_mut(&id);
        let Some(volume) = volume.filter(|_| !is_moving) else {
            let all = places.into_iter().map(|place| place.borrowed.lease).chain(unused);
            return (all.collect(), false);
        };
        volume.places.extend(places.into_iter().map(|place| (place.borrowed.lease, place)));
        (unused, true)
    }

    pub(crate) fn job_step(&mut self, host: HostNumber, id: JobId) {
        let Some(job) = self.hosts[host].machine.jobs.get(&id).cloned() else { return };
        self.touch(host);
        match self.next(host, id, &job) {
            Next::Step(wait) => self.agenda.enter(self.now + wait, Event::JobStep(host, id)),
            Next::End(event) => {
                self.hosts[host].machine.jobs.remove(&id);
                self.end(host, &job, event);
            }
        }
    }

    /// Reports the end of a job to the agent that ordered it, if that still runs.
    fn end(&mut self, host: HostNumber, job: &Job, event: Option<Done>) {
        let at = &mut self.hosts[host];
        at.note(self.now, format!("ends {:?}: {event:?}", job.work));
        if at.starts != job.ordered_by {
            return;
        }
        let Some(agent) = &mut at.agent else { return };
        match &event {
            Some(Done::Activated { volume }) => match at.machine.volumes.get(volume) {
                Some(made) if !made.is_swap() => _ = agent.known.regions.insert(*volume),
                _ => _ = agent.known.swap.insert(*volume),
            },
            Some(Done::Deactivated { volume }) => _ = agent.known.swap.remove(volume),
            _ => {}
        }
        self.input(host, Input::Done { work: job.work.clone(), event });
    }

    fn next(&mut self, host: HostNumber, id: JobId, job: &Job) -> Next {
        if let Some(why) = job.fails.clone() {
            return Next::End(self.fail(host, job, why));
        }
        match job.task.clone() {
            Task::Activate(live) => Next::End(Some(self.activate(host, live))),
            Task::Extend { volume, unused } => Next::End(Some(Done::Extended { volume, unused })),
            Task::Copy { volume, of, onto } => {
                Next::End(Some(self.copy_to(host, volume, of, onto)))
            }
            Task::Deactivate(volume) => self.copy(host, id, job, Target::Volume(volume)),
            Task::Evacuate { volume, lease, .. } => {
                self.copy(host, id, job, Target::Lease(volume, lease))
            }
            Task::Open(lent) => Next::End(Some(self.open(host, lent))),
            Task::Record(lent) => Next::End(Some(self.record(host, lent))),
            Task::Free(lease) => {
                self.free(host, lease);
                Next::End(Some(Done::LeaseFreed { lease }))
            }
        }
    }

    /// Ends a job that fails, and lets the volume take writes again.
    fn fail(&mut self, host: HostNumber, job: &Job, why: String) -> Option<Done> {
        self.counts.failures += 1;
        self.resume_writes(host, job);
        Some(match job.task.clone() {
            Task::Activate(LiveVolume { volume, .. }) => Done::ActivationFailed { volume, why },
            Task::Extend { volume, unused } => Done::Extended { volume, unused },
            Task::Copy { onto, .. } => Done::Copied { lease: onto.lease, failed: Some(why) },
            Task::Deactivate(volume) => Done::DeactivationFailed { volume, why },
            Task::Evacuate { lease, unused, .. } => Done::EvacuationFailed { lease, unused, why },
            Task::Open(LentLease { lease, .. }) => Done::LeaseFailed { lease, why },
            Task::Record(LentLease { lease, .. }) => Done::RecordFailed { lease, why },
            // The controller orders it again.
            Task::Free(_) => return None,
        })
    }

    fn resume_writes(&mut self, host: HostNumber, job: &Job) {
        if !job.has_begun {
            return;
        }
        let volumes = &mut self.hosts[host].machine.volumes;
        match &job.task {
            Task::Deactivate(volume) => {
                if let Some(volume) = volumes.get_mut(volume) {
                    volume.is_detaching = false;
                }
            }
            Task::Evacuate { volume, lease, .. } => {
                let volume = volumes.get_mut(volume);
                if let Some(place) = volume.and_then(|volume| volume.places.get_mut(lease)) {
                    place.is_leaving = false;
                }
            }
            _ => {}
        }
    }

    /// Begins second copies of a lease.
    fn copy_to(
        &mut self,
        host: HostNumber,
        volume: VolumeId,
        of: LeaseId,
        onto: BorrowedLease,
    ) -> Done {
        let (lease, lender) = (onto.lease, self.names[&onto.lender]);
        let reaches = self.reaches(host, lender, lease);
        let machine = &mut self.hosts[host].machine;
        let is_moving = machine.is_moving(volume);
        let volume = machine.volumes.get_mut(&volume).filter(|_| reaches && !is_moving);
        let begun = volume.is_some_and(|volume| volume.add_copy(of, Place::new(onto, lender)));
        self.counts.copies += u64::from(begun);
        let why = || "the lender does not answer, or the region has changed".to_owned();
        Done::Copied { lease, failed: (!begun).then(why) }
    }

    fn activate(&mut self, host: HostNumber, live: LiveVolume) -> Done {
        let volume = live.volume;
        let lender_of = |lease: &BorrowedLease| self.names[&lease.lender];
        let silent =
            live.leases.iter().find(|lease| !self.reaches(host, lender_of(lease), lease.lease));
        if let Some(silent) = silent {
            let why = format!("{} does not answer", silent.lender);
            return Done::ActivationFailed { volume, why };
        }
        let region = live.owner.region().cloned();
        let new = Volume::new(live, lender_of);
        let machine = &mut self.hosts[host].machine;
        let is_moving = machine.is_moving(volume);
        if let Some(known) = machine.volumes.get_mut(&volume).filter(|_| !is_moving) {
            // The region has spilled all that it had at lenders.
            known.places.extend(new.places);
            return Done::Activated { volume };
        }
        if region.is_some_and(|region| !machine.begin_to_run(&region, volume)) {
            let why = "its region is gone".to_owned();
            return Done::ActivationFailed { volume, why };
        }
        machine.volumes.insert(volume, new);
        Done::Activated { volume }
    }

    fn open(&mut self, host: HostNumber, lent: LentLease) -> Done {
        self.check_request(host, &lent);
        let (lease, users) = (lent.lease, self.users(&lent));
        let new = Stored {
            lent,
            users,
            stored: Bytes::ZERO,
            connected: self.now,
            is_finished: false,
            is_freeing: false,
            is_recalled: false,
        };
        self.hosts[host].machine.store.insert(lease, new);
        Done::LeaseOpened { lease, uris: uris(host) }
    }

    /// Writes down which hosts may use a lease.
    fn record(&mut self, lender: HostNumber, lent: LentLease) -> Done {
        let (lease, users) = (lent.lease, self.users(&lent));
        match self.hosts[lender].machine.store.get_mut(&lease) {
            Some(kept) => {
                (kept.lent, kept.users) = (lent.clone(), users);
                Done::LeaseRecorded(lent)
            }
            None => Done::RecordFailed { lease, why: "it is gone".to_owned() },
        }
    }

    /// Drops a lease. Pages in it are lost: their programs read them from the disk again.
    fn free(&mut self, lender: HostNumber, lease: LeaseId) {
        let Some(kept) = self.hosts[lender].machine.store.remove(&lease) else { return };
        for borrower in kept.users {
            self.touch(borrower);
            let machine = &mut self.hosts[borrower].machine;
            let mut volumes = machine.volumes.values_mut();
            let Some(volume) = volumes.find(|volume| volume.places.contains_key(&lease)) else {
                continue;
            };
            let Some(place) = volume.places.get_mut(&lease) else { continue };
            let lost = std::mem::take(&mut place.placed);
            match volume.is_swap() {
                true => machine.disk += lost,
                false => volume.spilled += lost,
            }
            self.counts.lost_bytes += lost.0;
        }
    }

    /// Copies an extent, and ends the job after the last one.
    fn copy(&mut self, host: HostNumber, id: JobId, job: &Job, target: Target) -> Next {
        let reached = self.reached(host);
        let (copied, postings) = self.hosts[host].machine.copy(target, &reached);
        self.post(host, postings);
        let since = match copied {
            Copied::Nothing => Some(job.waits_since.unwrap_or(self.now)),
            _ => None,
        };
        if let Some(job) = self.hosts[host].machine.jobs.get_mut(&id) {
            job.waits_since = since;
        }
        match copied {
            Copied::All => Next::End(Some(self.leave(host, job))),
            Copied::Some(bytes) => {
                let seconds = bytes.0 as f64 / self.scenario.costs.bandwidth.0.max(1) as f64;
                Next::Step(STEP + Duration::from_secs_f64(seconds))
            }
            Copied::Nothing => {
                let waited = since.map_or(Duration::ZERO, |since| self.now - since);
                if waited < self.scenario.costs.io_timeout {
                    return Next::Step(RETRY);
                }
                Next::End(self.fail(host, job, "a lender does not answer".to_owned()))
            }
        }
    }

    /// Removes an empty volume, or an empty lease from its volume.
    fn leave(&mut self, host: HostNumber, job: &Job) -> Done {
        let volumes = &mut self.hosts[host].machine.volumes;
        match &job.task {
            Task::Evacuate { volume, lease, unused } => {
                if let Some(volume) = volumes.get_mut(volume) {
                    volume.remove(*lease);
                }
                Done::Evacuated { lease: *lease, unused: unused.clone() }
            }
            Task::Deactivate(volume) | Task::Activate(LiveVolume { volume, .. }) => {
                volumes.remove(volume);
                Done::Deactivated { volume: *volume }
            }
            Task::Extend { volume, unused } => {
                Done::Extended { volume: *volume, unused: unused.clone() }
            }
            Task::Copy { onto, .. } => Done::Copied { lease: onto.lease, failed: None },
            Task::Open(LentLease { lease, .. })
            | Task::Record(LentLease { lease, .. })
            | Task::Free(lease) => Done::LeaseFreed { lease: *lease },
        }
    }

    /// Settles the jobs of an agent that dies. Processes of volumes go on with their copies. All
    /// other work has happened by now, or never will.
    pub(super) fn settle_jobs_of_dead(&mut self, host: HostNumber) {
        let jobs = std::mem::take(&mut self.hosts[host].machine.jobs);
        for (id, job) in jobs {
            let is_copy = matches!(job.task, Task::Deactivate(_) | Task::Evacuate { .. });
            if is_copy {
                self.hosts[host].machine.jobs.insert(id, job);
            } else if self.rng.random_bool(0.5) {
                let _ = self.next(host, id, &job);
            }
        }
    }
}
