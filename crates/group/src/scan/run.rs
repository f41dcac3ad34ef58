//! A scanner at work.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_control::group::scan_rate::{Config, Controller};
use aquifer_page::Group;

use super::payer::{self, Payer};
use super::totals::Totals;
use super::{Report, ScanError, Scanner, failed};
use crate::member::{Members, cpu_seconds};

/// Between two looks at pages: few enough at a time that nobody waits for a processor.
const TICK: Duration = Duration::from_millis(10);

/// A period of the rate's controller (Groups, section 6.1).
const PERIOD: Duration = Duration::from_secs(1);

/// On whose account a scanner is.
#[derive(Debug)]
struct Accounted {
    directory: PathBuf,
    group: Group,
    /// The cgroup of its own group.
    home: Option<PathBuf>,
    /// Who pays, if not its own group, and that one's regions.
    payer: Option<(Payer, Members)>,
}

impl Accounted {
    /// On its own group's: in its cgroup, or at the lowest priority.
    fn new(directory: &Path, group: &Group, home: Option<&Path>) -> Result<Self, ScanError> {
        let be_modest = || Ok(rustix::process::setpriority_process(None, 19)?);
        home.map_or_else(be_modest, join_cgroup)
            .map_err(failed("joining the cgroup", home.unwrap_or(directory)))?;
        let (directory, group) = (directory.to_owned(), group.clone());
        Ok(Self { directory, group, home: home.map(Path::to_owned), payer: None })
    }

    /// Finds who pays now. True if that is another one than before.
    fn look(&mut self) -> bool {
        let now = payer::read(&self.directory, &self.group).ok().flatten();
        if now.as_ref() == self.payer.as_ref().map(|(payer, _)| payer) {
            if let Some((_, members)) = &mut self.payer {
                // Who cannot be looked at now has done nothing.
                let _ = members.look();
            }
            return false;
        }
        if let Some(home) = &self.home {
            let cgroup = now.as_ref().and_then(|payer| payer.cgroup.as_ref()).unwrap_or(home);
            if let Err(error) = join_cgroup(cgroup) {
                tracing::warn!(cgroup = %cgroup.display(), "the scanner stays on the account where it is: {error}");
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

/// Puts this process into a cgroup, whose limits and shares of CPU are then its own.
///
/// # Errors
/// The system's.
pub fn join_cgroup(cgroup: &Path) -> io::Result<()> {
    fs::write(cgroup.join("cgroup.procs"), "0")
}

impl Scanner {
    /// Looks for equal pages, at the rate that `config` has it, until `goes_on` says no: in its tenant's `cgroup` or, where there is none, at the lowest
    /// priority. Tells once in a period how things are.
    ///
    /// # Errors
    /// [`ScanError`].
    pub fn run(
        &mut self,
        config: Config,
        cgroup: Option<&Path>,
        goes_on: impl Fn() -> bool,
        mut tell: impl FnMut(&Report),
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
            // What could not be done in time is not made up for.
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
                // What another group has done before is not of this period.
                let since = if changed { totals } else { before.2 };
                let verdict = controller.step(&totals.since(&since, scanner, seconds * processors));
                let payer = accounted.payer.as_ref().map(|(payer, _)| &payer.group);
                tell(&self.report(sharing, verdict, payer, scanner / seconds * 100.0));
                before = (Instant::now(), cpu, totals);
            }
        }
        Ok(())
    }
}
