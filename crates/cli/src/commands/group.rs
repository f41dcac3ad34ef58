//! `aquifer group`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use aquifer_control::group::scan_rate::{Config, Rate, Variant};
use aquifer_group::scan::{self, Report, Scanner, Sharing};
use aquifer_group::{Agreement, Agreements, Sealed};
use aquifer_page::Group as Name;
use aquifer_region::process::client as regions;
use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGTERM};

use super::Common;
use super::region::directory;
use crate::failure::{Failure, OrFail, Result};
use crate::manual::Manual;
use crate::output;
use crate::progress::Progress;

/// Tenants: VMs and regions whose pages may be shared with each other, and with no one else's
///
/// A group is a file that all hosts of the group have. 'create' makes it with a key of the group's own; copy it to the other hosts.
/// A region or VM joins when it is made, by --group. Equal pages of a group are kept once by lenders ('export --share') and on a host ('group scan').
#[derive(Debug, Args)]
pub struct Group {
    #[command(subcommand)]
    what: What,
    #[command(flatten)]
    groups: Groups,
}

/// Where agreements are.
#[derive(Clone, Debug, Args)]
pub(crate) struct Groups {
    /// Where the agreements of groups are
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        env = "AQUIFER_GROUPS",
        default_value = "/etc/aquifer/groups"
    )]
    groups: PathBuf,
}

impl Groups {
    /// They.
    pub(crate) fn all(&self) -> Agreements {
        Agreements::of(&self.groups)
    }
}

#[derive(Debug, Subcommand)]
enum What {
    /// Makes a group, with a new key
    Create(Create),
    /// The groups that this host knows
    List,
    /// What a group agrees on
    Show(Which),
    /// Changes what a group agrees on, for what joins from now on
    Set(Set),
    /// Has this host forget a group
    Rm(Which),
    /// Looks for equal pages of the group's regions on this host, and has them be kept once
    Scan(Scan),
}

#[derive(Debug, Args)]
struct Which {
    /// The group
    name: Name,
}

#[derive(Debug, Args)]
struct Create {
    /// The group
    name: Name,
    /// How its pages leave a host
    #[arg(long, value_name = "WAY", default_value = "deterministic")]
    sealed: SealedName,
}

#[derive(Debug, Args)]
struct Set {
    /// The group
    name: Name,
    /// How its pages leave a host
    #[arg(long, value_name = "WAY", required_unless_present = "scan")]
    sealed: Option<SealedName>,
    /// How fast equal pages are looked for: csd, cs, c, or so many pages per millisecond
    #[arg(long, value_name = "RATE", value_parser = rate)]
    scan: Option<Variant>,
}

#[derive(Debug, Args)]
struct Scan {
    /// The group
    name: Name,
    /// How fast: csd (by free CPU, by swapping, and by what is found), cs, c, or so many pages per millisecond. Unless given, as the group agrees
    #[arg(long, value_name = "RATE", value_parser = rate)]
    scan: Option<Variant>,
    /// Joins this cgroup, in which the tenant pays for the CPU. Unless given, it runs at the lowest priority
    #[arg(long, value_name = "DIR")]
    cgroup: Option<PathBuf>,
    /// Says so often how it is; with --json a line each time
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    report: Option<Duration>,
    /// Has nothing be shared any more, and ends
    #[arg(long)]
    undo: bool,
}

/// How fast pages are scanned.
fn rate(text: &str) -> std::result::Result<Variant, String> {
    match text {
        "c" => Ok(Variant::C),
        "cs" => Ok(Variant::Cs),
        "csd" => Ok(Variant::Csd),
        number => match number.parse() {
            Ok(pages) => Ok(Variant::Static(Rate(pages))),
            Err(_) => Err("'csd', 'cs', 'c', or a number of pages per millisecond".to_owned()),
        },
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum SealedName {
    /// Under the group's key, so that a lender can keep equal pages once; it can tell which are equal
    Deterministic,
    /// Each lease under a key of its own: a lender can tell nothing of two pages, and share none
    Random,
    /// As they are, for the lender to read
    Off,
}

impl From<SealedName> for Sealed {
    fn from(name: SealedName) -> Self {
        match name {
            SealedName::Deterministic => Self::Deterministic,
            SealedName::Random => Self::Random,
            SealedName::Off => Self::Off,
        }
    }
}

/// A group, as it is shown: without its key, but by what to tell whether two hosts have the same.
#[derive(Debug, Serialize)]
struct Shown {
    name: Name,
    sealed: Sealed,
    key_id: String,
    file: PathBuf,
    /// Regions of this host that are in it.
    regions: Vec<String>,
    /// How fast equal pages are looked for.
    scan: Config,
    /// What the regions here share.
    sharing: Sharing,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        (
            "aquifer group create blue",
            "Then copy /etc/aquifer/groups/blue.toml to the other hosts of the group",
        ),
        (
            "aquifer vm start web --group blue --memory 8G --cache 2G --lender nbds://b.example.org/ --tls /etc/aquifer/tls --disk web.qcow2",
            "A VM of the group: what leaves this host for b is sealed under the group's key",
        ),
        (
            "aquifer group scan blue --report 10s",
            "Equal pages of the group's VMs on this host are kept once, for as long as this looks for them; says what that saves",
        ),
        (
            "aquifer group set blue --sealed random",
            "For tenants to whom it matters that a lender can tell which pages are equal",
        ),
    ],
    notes: &[
        (
            "Equal pages on one host",
            "'scan' works on regions (of VMs in the pool, 'vm start --cache') while it runs, at the lowest priority or in the cgroup that it is told. It may be killed, and \
         started again; what is shared stays so until somebody writes to it, or --undo. It never looks at pages of another group.",
        ),
        (
            "Keys",
            "Whoever has a group's file can read what its members have with lenders, and nothing of other groups. Leases keep the key that they were made with: \
         'set' and 'rm' change nothing for regions and VMs that are there.",
        ),
    ],
    see_also: &["aquifer-region(1)", "aquifer-vm(1)", "aquifer-export(1)"],
    ..Manual::NONE
};

impl Group {
    /// Runs it.
    ///
    /// # Errors
    /// What is wrong with the group, or its file.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let all = self.groups.all();
        let shown = |agreement: &Agreement| shown(common, &all, agreement);
        match self.what {
            What::Create(Create { name, sealed }) => {
                let what = || format!("making group '{name}'");
                let agreement = Agreement::new(name.clone(), sealed.into());
                all.create(&agreement).or_fail(what)?;
                output::answer(common.json, &shown(&agreement)?, text)?;
            }
            What::List => {
                let groups = all.all().or_fail(|| "listing groups")?;
                let groups: Vec<_> = groups.iter().map(shown).collect::<Result<_>>()?;
                output::answer(common.json, &groups, |groups| listed(groups))?;
            }
            What::Show(Which { name }) => {
                let agreement = all.get(&name).or_fail(|| format!("showing group '{name}'"))?;
                output::answer(common.json, &shown(&agreement)?, text)?;
            }
            What::Set(Set { name, sealed, scan }) => {
                let what = || format!("changing group '{name}'");
                let mut agreement = all.get(&name).or_fail(what)?;
                agreement.sealed = sealed.map_or(agreement.sealed, Sealed::from);
                agreement.scan.variant = scan.unwrap_or(agreement.scan.variant);
                all.change(&agreement).or_fail(what)?;
                output::answer(common.json, &shown(&agreement)?, text)?;
            }
            What::Scan(scan) => scan.run(common, &all)?,
            What::Rm(Which { name }) => {
                let what = || format!("removing group '{name}'");
                let agreement = shown(&all.get(&name).or_fail(what)?)?;
                if !agreement.regions.is_empty() {
                    let why = format!("there are regions in it: {}", agreement.regions.join(", "));
                    return Err(
                        Failure::new(what(), why).help("stop their VMs, or 'aquifer region rm' them, first")
                    );
                }
                all.remove(&name).or_fail(what)?;
                output::answer(common.json, &agreement, |agreement| format!("{}: removed", agreement.name))?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Scan {
    fn run(self, common: &Common, all: &Agreements) -> Result<()> {
        let what = || format!("looking for equal pages of group '{}'", self.name);
        let directory = directory(common)?;
        if self.undo {
            let _progress = Progress::spinner(format!("parting what group '{}' shares", self.name));
            Scanner::undo(&directory, &self.name).or_fail(what)?;
            let sharing = scan::sharing(&directory, &self.name).or_fail(what)?;
            return output::answer(common.json, &sharing, saved);
        }
        let mut config = all.get(&self.name).or_fail(what)?.scan;
        config.variant = self.scan.unwrap_or(config.variant);
        config.validate().or_fail(what)?;
        match &self.cgroup {
            Some(cgroup) => scan::join_cgroup(cgroup).or_fail(|| format!("joining {}", cgroup.display()))?,
            None => scan::be_modest().or_fail(what)?,
        }
        let ended = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, ended.clone()).or_fail(what)?;
        }
        let mut last: Option<Instant> = None;
        let tell = |report: &Report| {
            if self.report.is_some_and(|every| last.is_none_or(|last| last.elapsed() >= every)) {
                last = Some(Instant::now());
                // Whoever listened may be gone.
                let _ = output::answer(common.json, report, progress);
            }
        };
        let goes_on = || !ended.load(Ordering::Relaxed);
        Scanner::new(&directory, self.name.clone()).run(config, goes_on, tell).or_fail(what)
    }
}

fn progress(report: &Report) -> String {
    let Report { sharing, scanner_cpu_pct, why, .. } = report;
    format!("{}; {why}; the scanner uses {scanner_cpu_pct:.0} % of a CPU", saved(sharing))
}

fn saved(sharing: &Sharing) -> String {
    let Sharing { regions, shared_bytes, frames_bytes, saved_bytes, broken, .. } = sharing;
    format!(
        "{regions} regions share {shared_bytes} in {frames_bytes}: {saved_bytes} saved; {broken} pages parted by writes"
    )
}

fn shown(common: &Common, all: &Agreements, agreement: &Agreement) -> Result<Shown> {
    let Agreement { name, sealed, key, scan } = agreement;
    let sharing = scan::sharing(&directory(common)?, name).or_fail(|| "counting what is shared")?;
    let regions = regions::list(&directory(common)?).or_fail(|| "listing regions")?;
    let is_in =
        |files: &aquifer_region::process::Files| regions::record(files).is_ok_and(|spec| spec.group == *name);
    let regions = regions.iter().filter(|files| is_in(files)).map(|files| files.name().to_string()).collect();
    Ok(Shown {
        name: name.clone(),
        sealed: *sealed,
        key_id: key.id(),
        file: all.file(name),
        scan: scan.clone(),
        regions,
        sharing,
    })
}

fn text(shown: &Shown) -> String {
    let Shown { name, sealed, key_id, file, regions, sharing, .. } = shown;
    let how = match sealed {
        Sealed::Deterministic => {
            "sealed under its key: lenders can keep equal pages once, and tell which are equal"
        }
        Sealed::Random => "sealed under a key for each lease: lenders can tell nothing of two pages",
        Sealed::Off => "NOT sealed: lenders can read them",
    };
    let regions = if regions.is_empty() { "none".to_owned() } else { regions.join(", ") };
    format!(
        "{name}\n  pages that leave a host  {how}\n  key                      {key_id}\n  file                     {}\n  regions here             {regions}\n  kept once here           {}",
        file.display(),
        saved(sharing)
    )
}

fn listed(groups: &[Shown]) -> String {
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["GROUP", "SEALED", "KEY", "REGIONS"]);
    for Shown { name, sealed, key_id, regions, .. } in groups {
        let sealed = format!("{sealed:?}").to_lowercase();
        table.add_row([name.to_string(), sealed, key_id.clone(), regions.len().to_string()]);
    }
    table.to_string()
}
