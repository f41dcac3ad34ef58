//! A scanner at work.

use std::fs;
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_control::group::scan_rate::{Config, Controller};

use super::member::cpu_seconds;
use super::{Report, ScanError, Scanner};

/// Between two looks at pages: few enough at a time that nobody waits for a processor.
const TICK: Duration = Duration::from_millis(10);

/// A period of the rate's controller (Groups, section 6.1).
const PERIOD: Duration = Duration::from_secs(1);

/// Puts this process into a cgroup of its tenant's, whose limits and shares of CPU are then its own.
///
/// # Errors
/// The system's.
pub fn join_cgroup(directory: &Path) -> io::Result<()> {
    fs::write(directory.join("cgroup.procs"), "0")
}

/// Has VMs come before this process wherever processors are short.
///
/// # Errors
/// The system's.
pub fn be_modest() -> io::Result<()> {
    Ok(rustix::process::setpriority_process(None, 19)?)
}

impl Scanner {
    /// Looks for equal pages, at the rate that `config` has it, until `goes_on` says no. Tells once in a period how things are.
    ///
    /// # Errors
    /// [`ScanError`].
    pub fn run(
        &mut self,
        config: Config,
        goes_on: impl Fn() -> bool,
        mut tell: impl FnMut(&Report),
    ) -> Result<(), ScanError> {
        let processors = thread::available_parallelism().map_or(1, usize::from) as f64;
        let own = std::process::id();
        let mut controller = Controller::new(config);
        self.look()?;
        let mut before = (Instant::now(), cpu_seconds(own), self.activity());
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
                let totals = self.activity();
                let (cpu, seconds) = (cpu_seconds(own), before.0.elapsed().as_secs_f64());
                let scanner = cpu - before.1;
                let verdict = controller.step(&totals.since(&before.2, scanner, seconds * processors));
                tell(&self.report(verdict, scanner / seconds * 100.0));
                before = (Instant::now(), cpu, totals);
            }
        }
        Ok(())
    }
}
