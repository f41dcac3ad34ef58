//! The loop of a scanner.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_control::group::scan_rate::{Config, Controller};
use aquifer_page::Group;
use aquifer_procfs::process::cpu_seconds;

use super::Scanner;
use super::totals::Totals;
use crate::cpu_billing::{self, CpuBilling};
use crate::{Members, ScanError, ScanReport, failed};

/// Pause between two batches, short enough that a batch keeps no thread waiting for a processor.
const TICK: Duration = Duration::from_millis(10);

/// Period of the rate's controller (\[Kim14\], section 6.1).
const PERIOD: Duration = Duration::from_secs(1);

/// The account to which a scanner's CPU time is charged.
#[derive(Debug)]
struct Accounted {
    directory: PathBuf,
    group: Group,
    /// The cgroup of the scanner's own group.
    home: Option<PathBuf>,
    /// The paying group and its regions, if it is not the scanner's own.
    payer: Option<(CpuBilling, Members)>,
}

impl Accounted {
    /// Charges the scanner's own group: moves this process to the group's cgroup, or else to the
    /// lowest priority.
    fn new(directory: &Path, group: &Group, home: Option<&Path>) -> Result<Self, ScanError> {
        let be_modest = || Ok(rustix::process::setpriority_process(None, 19)?);
        home.map_or_else(be_modest, join_cgroup)
            .map_err(failed("joining the cgroup", home.unwrap_or(directory)))?;
        let (directory, group) = (directory.to_owned(), group.clone());
        Ok(Self { directory, group, home: home.map(Path::to_owned), payer: None })
    }

    /// Reads the current payer; returns whether it has changed.
    fn look(&mut self) -> bool {
        let now = cpu_billing::read(&self.directory, &self.group).ok().flatten();
        if now.as_ref() == self.payer.as_ref().map(|(payer, _)| payer) {
            if let Some((_, members)) = &mut self.payer {
                // Regions that cannot be read now count as idle.
                let _ = members.look();
            }
            return false;
        }
        if let Some(home) = &self.home {
            let cgroup = now.as_ref().and_then(|payer| payer.cgroup.as_ref()).unwrap_or(home);
            if let Err(error) = join_cgroup(cgroup) {
                tracing::warn!(
                    cgroup = %cgroup.display(),
                    "the scanner cannot join the cgroup, and stays in its current one: {error}"
                );
            }
        }
        self.payer = now.map(|payer| {
            let mut members = Members::new(&self.directory, &payer.group);
            let _ = members.look();
            (payer, members)
        });
        true
    }

    fn members(&self) -> Option<&Members> {
        self.payer.as_ref().map(|(_, members)| members)
    }
}

/// Moves this process into a cgroup, which then limits and accounts its CPU time.
///
/// # Errors
/// If the cgroup does not exist, or refuses the process.
pub fn join_cgroup(cgroup: &Path) -> io::Result<()> {
    fs::write(cgroup.join("cgroup.procs"), "0")
}

impl Scanner {
    /// Scans at the rate that a controller with `config` sets, until `goes_on` returns false. Calls
    /// `tell` once a period.
    ///
    /// The process runs in its tenant's `cgroup` or, without one, at the lowest priority.
    ///
    /// # Errors
    /// [`ScanError`] if the cgroup cannot be joined, or looking or scanning fails.
    pub fn run(
        &mut self,
        config: Config,
        cgroup: Option<&Path>,
        goes_on: impl Fn() -> bool,
        mut tell: impl FnMut(&ScanReport),
    ) -> Result<(), ScanError> {
        let processors = thread::available_parallelism().map_or(1, usize::from) as f64;
        let own = std::process::id();
        let mut controller = Controller::new(config);
        let mut accounted = Accounted::new(&self.directory, &self.group, cgroup)?;
        self.look()?;
        accounted.look();
        let totals = Totals::of(&self.members, &self.sharing(), accounted.members());
        let mut before = (Instant::now(), cpu_seconds(own), totals);
        let mut due = 0.0;
        let mut last = Instant::now();
        while goes_on() {
            thread::sleep(TICK);
            let milliseconds = last.elapsed().as_secs_f64() * 1000.0;
            last = Instant::now();
            let rate = f64::from(controller.rate().0);
            // Time lost is made up for ten ticks at most.
            due = (due + rate * milliseconds).min(rate * 1000.0 * TICK.as_secs_f64() * 10.0);
            let looked = self.scan(due as u64)?;
            due = if looked < due as u64 { 0.0 } else { due - looked as f64 };
            if before.0.elapsed() >= PERIOD {
                self.look()?;
                let changed = accounted.look();
                let sharing = self.sharing();
                let totals = Totals::of(&self.members, &sharing, accounted.members());
                let (cpu, seconds) = (cpu_seconds(own), before.0.elapsed().as_secs_f64());
                let scanner = cpu - before.1;
                // The new payer's activity of earlier periods does not count.
                let since = if changed { totals } else { before.2 };
                let activity = totals.since(&since, scanner, seconds * processors);
                let decision = controller.step(&activity);
                let payer = accounted.payer.as_ref().map(|(payer, _)| &payer.group);
                tell(&self.report(sharing, decision, payer, scanner / seconds * 100.0));
                before = (Instant::now(), cpu, totals);
            }
        }
        Ok(())
    }
}
