//! The balancer of a host (`MON` of \[Bielski18\], section III-B): it reads the state of the
//! guests, and resizes them as `aquifer_control::balance` decides.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_control::balance::{Balancer, Because, Config, Host, Move, Plan, Reading};
use aquifer_page::{Bytes, RegionName};
use aquifer_procfs::{available_memory, total_memory};

use super::budget::{Accounts, Budget, Kind};
use super::figures::{self, Figures};
use super::growth::{GrowthLimit, Room, within};
use super::resize::{Order, Resized};
use crate::error::VmError;
use crate::process::{Files, client, side_by_side};

/// How long a guest that does not give up its surplus is asked again. The time is short, because
/// another guest may give sooner.
const RETRY: Duration = Duration::from_secs(1);

/// How long a guest that gave nothing is left alone.
const REST: Duration = Duration::from_secs(10);

/// How long a VM without figures is not asked again.
const SILENT: Duration = Duration::from_secs(10);

/// A host is short of memory if less than one part in this many is available.
const SHORT: u64 = 20;

/// The outcome of a move.
#[derive(Debug)]
pub struct Moved {
    /// The move.
    pub is: Move,
    /// The result of its resize.
    pub end: Result<Resized, VmError>,
}

/// The findings of a step, and the moves that it started.
#[derive(Debug, Default)]
pub struct BalancerStep {
    /// The moves to make, and the reasons against others.
    pub plan: Plan,
    /// The moves of the plan that began. The others wait for memory, or were refused.
    pub begun: Vec<Move>,
    /// Moves of earlier steps that have ended since the last one.
    pub moved: Vec<Moved>,
    /// VMs without figures, and why: mostly their supervisor or QEMU does not answer. Each counts
    /// with the memory that the budget notes for it, and keeps it.
    pub silent: BTreeMap<RegionName, String>,
}

/// A VM without figures.
#[derive(Debug)]
struct Silent {
    why: String,
    ask_again: Instant,
}

/// The balancer of the VMs that compete for this host's RAM. One whose cache the operator sizes, or
/// is below its size, does not: it has that much RAM, whatever the size of its memory.
#[derive(Debug)]
pub struct Balancing {
    run_dir: PathBuf,
    /// The supervisor's program, as in [`client::start`].
    program: PathBuf,
    balancer: Balancer,
    /// VMs that are being resized.
    running: BTreeSet<RegionName>,
    /// VMs that are left alone until then.
    resting: BTreeMap<RegionName, Instant>,
    silent: BTreeMap<RegionName, Silent>,
    ended: (Sender<Moved>, Receiver<Moved>),
}

impl Balancing {
    /// Makes a balancer of the host whose processes have their files in `run_dir`.
    ///
    /// # Errors
    /// [`VmError::Misuse`] if the configuration is invalid.
    pub fn new(run_dir: &Path, program: &Path, config: Config) -> Result<Self, VmError> {
        config.validate().map_err(|error| VmError::Misuse(error.to_string()))?;
        Ok(Self {
            run_dir: run_dir.to_owned(),
            program: program.to_owned(),
            balancer: Balancer::new(config),
            running: BTreeSet::new(),
            resting: BTreeMap::new(),
            silent: BTreeMap::new(),
            ended: mpsc::channel(),
        })
    }

    /// Reads all VMs and decides; if `act`, also starts the resizes, each on a thread of its own.
    /// The caller calls this once a period. VMs grow within the budget, and within `limit`.
    ///
    /// # Errors
    /// [`VmError`] if the budget or the limits cannot be read, or a thread cannot start.
    pub fn step(
        &mut self,
        act: bool,
        limit: Option<&dyn GrowthLimit>,
    ) -> Result<BalancerStep, VmError> {
        let (mut moved, mut begun) = (Vec::new(), Vec::new());
        while let Ok(ended) = self.ended.1.try_recv() {
            moved.push(self.note(ended));
        }
        self.resting.retain(|_, until| *until > Instant::now());
        let accounts = Budget::of(&self.run_dir).accounts()?;
        let unpromised = accounts.local.free.saturating_sub(accounts.promised);
        let Room { free, recallable } = within(unpromised, limit.and_then(GrowthLimit::room));
        let host =
            Host { sections_free: free, recallable, section: accounts.section, short: is_short() };
        let readings = self.read(&accounts)?;
        let plan = self.balancer.step(&host, &readings);
        if act {
            // A VM that waits for memory is planned again as soon as there is some.
            let ready = |is: &&Move| !matches!(is.because, Because::Grows { waits: true, .. });
            let admitted = |is: &&Move| is.to < is.from || limit.is_none_or(|all| all.admits(is));
            for is in plan.moves.iter().filter(ready).filter(admitted) {
                self.begin(is)?;
                begun.push(is.clone());
            }
            if let Some(limit) = limit.filter(|_| plan.recall > Bytes::ZERO) {
                limit.recall(plan.recall);
            }
        }
        let silent =
            self.silent.iter().map(|(vm, silent)| (vm.clone(), silent.why.clone())).collect();
        Ok(BalancerStep { plan, begun, moved, silent })
    }

    /// Waits up to `at_most` until a move that a step started ends.
    pub fn wait(&mut self, at_most: Duration) -> Option<Moved> {
        let ended = self.ended.1.recv_timeout(at_most).ok()?;
        Some(self.note(ended))
    }

    fn note(&mut self, moved: Moved) -> Moved {
        self.running.remove(&moved.is.vm);
        // A resize that failed, because the VM was resized meanwhile for example, is planned anew.
        let gave_nothing = moved.end.as_ref().is_ok_and(|resized| resized.reached == resized.from);
        if gave_nothing {
            self.resting.insert(moved.is.vm.clone(), Instant::now() + REST);
        }
        moved
    }

    /// Reads the VMs' states, in parallel.
    fn read(&mut self, accounts: &Accounts) -> Result<Vec<Reading>, VmError> {
        let all = client::list(&self.run_dir)?;
        let competes = |files: &&Files| {
            let share = accounts.vms.get(files.name());
            // A cache below the VM's size bounds what the VM takes.
            share.is_some_and(|share| share.kind != Kind::Pool && share.local == share.memory())
        };
        let competing: Vec<_> = all.iter().filter(competes).collect();
        self.silent.retain(|vm, _| competing.iter().any(|files| files.name() == vm));
        // The supervisor of a VM in a resize is busy.
        let is_asked = |files: &&Files| {
            !self.is_busy(files.name())
                && self
                    .silent
                    .get(files.name())
                    .is_none_or(|silent| silent.ask_again <= Instant::now())
        };
        let asked: Vec<_> = competing.iter().copied().filter(is_asked).collect();
        let told = side_by_side(asked, |files| (files.name().clone(), client::reading(files)));
        let mut told: BTreeMap<_, _> = told
            .into_iter()
            .filter_map(|(vm, told)| Some((vm.clone(), self.heard(vm, told)?)))
            .collect();
        let mut readings = Vec::new();
        for files in competing {
            let Some(share) = accounts.vms.get(files.name()) else { continue };
            readings.push(self.reading(files, share.memory(), told.remove(files.name()))?);
        }
        Ok(readings)
    }

    fn is_busy(&self, vm: &RegionName) -> bool {
        self.running.contains(vm) || self.resting.contains_key(vm)
    }

    /// Notes whether a VM has answered, and logs changes of that.
    fn heard(
        &mut self,
        vm: RegionName,
        told: Result<figures::Reading, VmError>,
    ) -> Option<figures::Reading> {
        let error = match told {
            Ok(reading) => {
                if self.silent.remove(&vm).is_some() {
                    tracing::info!(%vm, "the VM sends its figures again");
                }
                return Some(reading);
            }
            Err(error) => error.to_string(),
        };
        if !self.silent.contains_key(&vm) {
            tracing::warn!(
                %vm,
                "the VM sends no figures, so the balancer uses the budget's size for it: {error}"
            );
        }
        self.silent.insert(vm, Silent { why: error, ask_again: Instant::now() + SILENT });
        None
    }

    /// Makes the balancer's input of a VM. Without figures, the VM counts with the memory noted for
    /// it.
    fn reading(
        &self,
        files: &Files,
        noted: Bytes,
        told: Option<figures::Reading>,
    ) -> Result<Reading, VmError> {
        let limits = files.limits()?;
        let silent = figures::Reading {
            size: noted,
            least: noted,
            most: noted,
            figures: None,
            wish: Bytes::ZERO,
        };
        let figures::Reading { size, least, most, figures, wish } = told.unwrap_or(silent);
        let answers = figures.is_some();
        let Figures { total, available, swap_used, swap_in, swap_out, pressure, .. } =
            figures.unwrap_or_else(Figures::none);
        let (min, max) = (limits.min.max(least), limits.max.min(most));
        Ok(Reading {
            vm: files.name().clone(),
            size,
            total,
            available,
            swap_in,
            swap_out,
            swap_used,
            pressure,
            wish,
            limits: super::Limits { min: min.min(max), max, ..limits },
            answers,
            busy: self.is_busy(files.name()),
        })
    }

    fn begin(&mut self, is: &Move) -> Result<(), VmError> {
        let files = Files::new(&self.run_dir, &is.vm);
        let (program, ended, is) = (self.program.clone(), self.ended.0.clone(), is.clone());
        self.running.insert(is.vm.clone());
        let resizing = move || {
            let order = Order {
                size: is.to,
                from: Some(is.from),
                exact: true,
                retry: RETRY,
                urgent: false,
                stages: false,
            };
            let end = client::resize(&program, &files, &order, |_| ());
            // After the balancer has ended, no thread receives this.
            let _ = ended.send(Moved { is, end });
        };
        let started = thread::Builder::new().name("balance".to_owned()).spawn(resizing);
        started.map(drop).map_err(VmError::io("cannot start a thread"))
    }
}

fn is_short() -> bool {
    match (available_memory(), total_memory()) {
        (Ok(available), Ok(total)) => available.0 < total.0 / SHORT,
        _ => false,
    }
}
