//! The balancer of a host at work (`MON` of the paper, Resizing, section III-B): it reads how the guests are, and has them resized as
//! `aquifer_control::balance` decides.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_control::balance::{Balancer, Because, Config, Host, Move, Plan, Reading};
use aquifer_page::{Bytes, RegionName};

use super::budget::{Accounts, Budget, Kind};
use super::figures::{self, Figures};
use super::resize::{Order, Resized};
use crate::error::GuestError;
use crate::meminfo;
use crate::process::{Files, client, side_by_side};

/// How long a guest is asked again that does not give up what the balancer takes for its surplus: soon another one is asked.
const RETRY: Duration = Duration::from_secs(1);

/// For how long one is left alone that gave nothing.
const REST: Duration = Duration::from_secs(10);

/// For how long a VM whose figures could not be had is not asked again.
const SILENT: Duration = Duration::from_secs(10);

/// A host with less than this share of its memory available is short of it.
const SHORT: u64 = 20;

/// What came of a move.
#[derive(Debug)]
pub struct Moved {
    /// The move.
    pub is: Move,
    /// Its end.
    pub end: Result<Resized, GuestError>,
}

/// What a turn has found, and begun.
#[derive(Debug, Default)]
pub struct Turn {
    /// What is to be done, and why what is not.
    pub plan: Plan,
    /// What of former turns has ended since the last one.
    pub moved: Vec<Moved>,
    /// VMs whose figures cannot be had, mostly as their keeper or QEMU does not answer, and why. Each counts with what the budget notes for it, and stays
    /// as it is.
    pub silent: BTreeMap<RegionName, String>,
}

/// A VM whose figures could not be had.
#[derive(Debug)]
struct Silent {
    why: String,
    ask_again: Instant,
}

/// Balances the memory of a host's VMs, whose memory is in its RAM. (Those in the pool do not take it from each other.)
#[derive(Debug)]
pub struct Balancing {
    run_dir: PathBuf,
    /// Keeps VMs, as in [`client::start`].
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
    /// Of the host whose processes have their files in `run_dir`.
    ///
    /// # Errors
    /// [`GuestError::Misuse`]: the configuration makes no sense.
    pub fn new(run_dir: &Path, program: &Path, config: Config) -> Result<Self, GuestError> {
        config.validate().map_err(|error| GuestError::Misuse(error.to_string()))?;
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

    /// Looks at all VMs, decides, and if it is to `act` has VMs be resized, each on a thread of its own. To be called each period.
    ///
    /// # Errors
    /// If what this host has set aside is not known.
    pub fn turn(&mut self, act: bool) -> Result<Turn, GuestError> {
        let mut moved = Vec::new();
        while let Ok(ended) = self.ended.1.try_recv() {
            moved.push(self.note(ended));
        }
        self.resting.retain(|_, until| *until > Instant::now());
        let accounts = Budget::of(&self.run_dir).accounts()?;
        let host = Host {
            sections_free: accounts.local.free.saturating_sub(accounts.promised),
            section: accounts.section,
            short: is_short(),
        };
        let readings = self.read(&accounts)?;
        let plan = self.balancer.step(&host, &readings);
        if act {
            // Who waits for others is planned again as soon as they have given.
            let ready = |is: &&Move| !matches!(is.because, Because::Grows { waits: true, .. });
            plan.moves.iter().filter(ready).try_for_each(|is| self.begin(is))?;
        }
        let silent =
            self.silent.iter().map(|(vm, silent)| (vm.clone(), silent.why.clone())).collect();
        Ok(Turn { plan, moved, silent })
    }

    /// Waits until something that a turn has begun ends, but no longer than this.
    pub fn wait(&mut self, at_most: Duration) -> Option<Moved> {
        let ended = self.ended.1.recv_timeout(at_most).ok()?;
        Some(self.note(ended))
    }

    fn note(&mut self, moved: Moved) -> Moved {
        self.running.remove(&moved.is.vm);
        // One that was resized meanwhile, say, is looked at anew.
        let gave_nothing = moved.end.as_ref().is_ok_and(|resized| resized.reached == resized.from);
        if gave_nothing {
            self.resting.insert(moved.is.vm.clone(), Instant::now() + REST);
        }
        moved
    }

    /// How the VMs are, each asked beside the others.
    fn read(&mut self, accounts: &Accounts) -> Result<Vec<Reading>, GuestError> {
        let all = client::list(&self.run_dir)?;
        let local = |files: &&Files| {
            accounts.vms.get(files.name()).is_some_and(|share| share.kind == Kind::Local)
        };
        let local: Vec<_> = all.iter().filter(local).collect();
        self.silent.retain(|vm, _| local.iter().any(|files| files.name() == vm));
        // One that is being resized has its keeper's hands full.
        let is_asked = |files: &&Files| {
            !self.is_busy(files.name())
                && self
                    .silent
                    .get(files.name())
                    .is_none_or(|silent| silent.ask_again <= Instant::now())
        };
        let asked: Vec<_> = local.iter().copied().filter(is_asked).collect();
        let told = side_by_side(asked, |files| (files.name().clone(), client::reading(files)));
        let mut told: BTreeMap<_, _> = told
            .into_iter()
            .filter_map(|(vm, told)| Some((vm.clone(), self.heard(vm, told)?)))
            .collect();
        let mut readings = Vec::new();
        for files in local {
            let Some(share) = accounts.vms.get(files.name()) else { continue };
            readings.push(self.reading(files, share.local, told.remove(files.name()))?);
        }
        Ok(readings)
    }

    fn is_busy(&self, vm: &RegionName) -> bool {
        self.running.contains(vm) || self.resting.contains_key(vm)
    }

    /// Notes whether a VM has answered, and says so where that is new.
    fn heard(
        &mut self,
        vm: RegionName,
        told: Result<figures::Reading, GuestError>,
    ) -> Option<figures::Reading> {
        let error = match told {
            Ok(reading) => {
                if self.silent.remove(&vm).is_some() {
                    tracing::info!(%vm, "tells its figures again");
                }
                return Some(reading);
            }
            Err(error) => error.to_string(),
        };
        if !self.silent.contains_key(&vm) {
            tracing::warn!(%vm, "counts with the memory that is noted for it, as its figures cannot be had: {error}");
        }
        self.silent.insert(vm, Silent { why: error, ask_again: Instant::now() + SILENT });
        None
    }

    /// A VM that has said this, or nothing; then it has what is noted for it.
    fn reading(
        &self,
        files: &Files,
        noted: Bytes,
        told: Option<figures::Reading>,
    ) -> Result<Reading, GuestError> {
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

    fn begin(&mut self, is: &Move) -> Result<(), GuestError> {
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
            // Nobody hears of it where the balancer has ended.
            let _ = ended.send(Moved { is, end });
        };
        let started = thread::Builder::new().name("balance".to_owned()).spawn(resizing);
        started.map(drop).map_err(GuestError::io("cannot start a thread"))
    }
}

fn is_short() -> bool {
    match (meminfo::available(), meminfo::total()) {
        (Ok(available), Ok(total)) => available.0 < total.0 / SHORT,
        _ => false,
    }
}
