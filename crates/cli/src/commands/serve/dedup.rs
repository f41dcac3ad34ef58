//! `aquifer serve dedup`.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use aquifer_control::group::scan_rate::Variant;
use aquifer_dedup::{ScanReport, Scanner, ScannerFiles, ScannerTerms, Sharing};
use aquifer_page::Group as Name;
use aquifer_procfs::end_oom_exemption;
use clap::Args;
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGTERM};

use crate::commands::Common;
use crate::commands::group::{Groups, rate};
use crate::commands::region::directory;
use crate::failure::{OrFail, Result};
use crate::output;
use crate::progress::Progress;

/// How long the scanner of an agent goes on without regions.
const LINGER: Duration = Duration::from_secs(5);

/// Share equal pages of a group's regions on this host
///
/// While it runs, it compares pages and keeps equal ones once, copy-on-write. A write to a shared
/// page costs a copy. Pages stay shared after it ends.
///
/// The host's agent runs one for each group with two regions here (`scan` in its configuration). A
/// second one of a group is refused.
#[derive(Debug, Args)]
pub(super) struct Dedup {
    /// Name of the group
    name: Name,
    /// Scan rate: csd, cs, c, or a number of pages per millisecond
    ///
    /// 'csd' adapts to free CPU, swapping and the savings found, 'cs' to the first two, and 'c' to
    /// free CPU only. The default is the rate in the group's terms.
    #[arg(long, value_name = "RATE", value_parser = rate)]
    scan: Option<Variant>,
    /// Join this cgroup, which is charged for the CPU
    ///
    /// The default is the cgroup in the group's terms. Without one the scanner runs at the lowest
    /// priority.
    #[arg(long, value_name = "DIR")]
    cgroup: Option<PathBuf>,
    /// Print savings at this interval; with --json as objects
    ///
    /// By default the command prints nothing. 'aquifer group show' prints the latest report.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    report: Option<Duration>,
    /// Unshare all pages of the group and exit
    ///
    /// This takes back the memory that sharing saved.
    #[arg(long)]
    undo: bool,
    /// Say that the host's agent starts it, and may end it
    #[arg(long, hide = true)]
    by_agent: bool,
    #[command(flatten)]
    groups: Groups,
}

impl Dedup {
    pub(super) fn run(self, common: &Common) -> Result<()> {
        let what = || format!("looking for equal pages of group '{}'", self.name);
        let directory = directory(common)?;
        if self.undo {
            let _progress = Progress::spinner(format!("unsharing pages of group '{}'", self.name));
            Scanner::undo(&directory, &self.name).or_fail(what)?;
            let sharing = aquifer_dedup::sharing(&directory, &self.name).or_fail(what)?;
            return output::answer(common.json, &sharing, saved);
        }
        let agreement = self.groups.all().get(&self.name).or_fail(what)?;
        let mut config = agreement.scan;
        config.variant = self.scan.unwrap_or(config.variant);
        config.validate().or_fail(what)?;
        let cgroup = self.cgroup.or(agreement.cgroup);
        // An agent is exempt, and its children inherit that.
        end_oom_exemption().or_fail(what)?;
        let ended = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, ended.clone()).or_fail(what)?;
        }
        let terms =
            ScannerTerms { by_agent: self.by_agent, scan: config.clone(), cgroup: cgroup.clone() };
        let held = ScannerFiles::new(&directory, &self.name).lock(terms).or_fail(what)?;
        let mut last: Option<Instant> = None;
        let mut seen = Instant::now();
        let tell = |report: &ScanReport| {
            if report.sharing.regions > 0 {
                seen = Instant::now();
            }
            // The agent that would end it may be gone, too.
            if self.by_agent && seen.elapsed() > LINGER {
                ended.store(true, Ordering::Relaxed);
            }
            // Others then see an older report; the scan goes on.
            let _ = held.write(Some(report));
            if self.report.is_some_and(|every| last.is_none_or(|last| last.elapsed() >= every)) {
                last = Some(Instant::now());
                // The reader may be gone; the scan goes on.
                let _ = output::answer(common.json, report, progress);
            }
        };
        let goes_on = || !ended.load(Ordering::Relaxed);
        let mut scanner = Scanner::new(&directory, self.name.clone());
        scanner.run(config, cgroup.as_deref(), goes_on, tell).or_fail(what)
    }
}

fn progress(report: &ScanReport) -> String {
    let ScanReport { group, payer, sharing, scanner_cpu_pct, why, .. } = report;
    let paid = if payer == group { String::new() } else { format!(", paid by group {payer}") };
    format!("{}; {why}; the scanner uses {scanner_cpu_pct:.0} % of a CPU{paid}", saved(sharing))
}

/// Describes for people how much memory sharing saves.
pub(in crate::commands) fn saved(sharing: &Sharing) -> String {
    let Sharing { regions, shared_bytes, frames_bytes, saved_bytes, broken, .. } = sharing;
    format!(
        "{regions} regions share {shared_bytes} in {frames_bytes}: {saved_bytes} saved; \
         {broken} pages unshared by writes"
    )
}
