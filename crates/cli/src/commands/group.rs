//! `aquifer group`.

mod manuals;
mod terms;

use std::path::PathBuf;
use std::process::ExitCode;

use aquifer_dedup::{RunningScanner, ScanReport, ScannerFiles, Sharing};
use aquifer_disk_cache as disks;
use aquifer_group::{Agreement, Agreements, GroupEncryption};
use aquifer_page::Group as Name;
use aquifer_region::process::client as regions;
use clap::error::ErrorKind;
use clap::{Args, Subcommand};
use serde::Serialize;

pub(super) use self::manuals::MANUALS;
use self::terms::Terms;
pub(super) use self::terms::rate;
use super::region::directory;
use super::serve::{cache_text, saved};
use super::{Common, misuse};
use crate::failure::{Failure, OrFail, Result};
use crate::manual::Manual;
use crate::output;
use crate::table::table;

/// Manage tenants whose VMs and regions share equal pages
///
/// A file with the group's terms and its key defines a group. 'create' writes the file; copy it to
/// the group's other hosts. A region or VM joins when it is created with --group.
///
/// Lenders store equal pages of a group once ('serve export --share'), and so does a host ('serve
/// dedup'). Pages are never shared across groups.
#[derive(Debug, Args)]
pub struct Group {
    #[command(subcommand)]
    what: What,
    #[command(flatten)]
    groups: Groups,
}

/// The default of --groups, and the variable that sets it.
pub(super) const GROUPS: &str = "/etc/aquifer/groups";
pub(super) const GROUPS_VARIABLE: &str = "AQUIFER_GROUPS";

/// Where agreements are.
#[derive(Clone, Debug, Args)]
pub(crate) struct Groups {
    /// Directory of the groups' files
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        env = GROUPS_VARIABLE,
        default_value = GROUPS
    )]
    groups: PathBuf,
}

impl Groups {
    /// Returns the agreements in this directory.
    pub(crate) fn all(&self) -> Agreements {
        Agreements::of(&self.groups)
    }
}

#[derive(Debug, Subcommand)]
enum What {
    /// Create a group with a new key
    Create(Create),
    /// List the groups that this host knows
    List,
    /// Show a group's terms, regions and savings on this host
    Show(Which),
    /// Change a group's terms
    ///
    /// Options that you omit keep their value. --member, --max-members, --max-memory and
    /// --encryption apply to members that join later. --max-cache applies at once. 'serve
    /// reprovision' reads its terms each period, 'serve dedup' when it starts.
    Set(Set),
    /// Remove a group from this host
    ///
    /// Fails while the group has regions here.
    Rm(Which),
}

#[derive(Debug, Args)]
struct Which {
    /// Name of the group
    name: Name,
}

#[derive(Debug, Args)]
struct Create {
    /// Name of the group
    name: Name,
    #[command(flatten)]
    terms: Terms,
}

#[derive(Debug, Args)]
struct Set {
    /// Name of the group
    name: Name,
    #[command(flatten)]
    terms: Terms,
}

/// A group as the command shows it: without its key, but with the key's fingerprint.
#[derive(Debug, Serialize)]
struct Shown {
    key_id: String,
    file: PathBuf,
    /// The group's regions on this host.
    regions: Vec<String>,
    /// The sharing figures of these regions.
    sharing: Sharing,
    /// The scanner that shares their equal pages; `None` if none runs here.
    scanner: Option<ShownScanner>,
    /// The state of the group's disk cache; `None` if it does not run here.
    cache: Option<disks::CacheStatus>,
    /// The agreement's terms.
    #[serde(flatten)]
    terms: serde_json::Value,
    #[serde(skip)]
    agreement: Agreement,
}

/// A group's scanner on this host.
#[derive(Debug, Serialize)]
struct ShownScanner {
    pid: u32,
    by_agent: bool,
    /// The report of its last period; `None` in its first one.
    report: Option<ScanReport>,
}

impl From<RunningScanner> for ShownScanner {
    fn from(RunningScanner { pid, terms, report }: RunningScanner) -> Self {
        let pid = pid.as_raw_nonzero().get().cast_unsigned();
        Self { pid, by_agent: terms.is_some_and(|terms| terms.by_agent), report }
    }
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        (
            "aquifer group create blue",
            "Create a group; then copy /etc/aquifer/groups/blue.toml to its other hosts",
        ),
        (
            "aquifer vm start web --group blue --memory 8G --cache 2G \
             --lender nbds://b/ --tls DIR",
            "Start a VM of the group; its pages are encrypted under the group's key",
        ),
        (
            "aquifer serve dedup blue --report 10s",
            "Share equal pages of the group's VMs and report savings every 10 s",
        ),
        ("aquifer serve reprovision", "Hand out the memory that sharing saves to the groups' VMs"),
        (
            "aquifer group set blue --policy fair --allow-lending yes --max-memory 64G",
            "Divide savings equally, lend the rest, and limit members' memory on a host",
        ),
        ("aquifer group set blue --encryption random", "Hide from lenders which pages are equal"),
    ],
    notes: &[(
        "Keys",
        "The holder of a group's file can read its members' pages at lenders, and no other \
         group's. Leases keep the key that they started with: 'set --encryption' and 'rm' do not \
         affect existing regions and VMs.",
    )],
    see_also: &["aquifer-region(1)", "aquifer-vm(1)", "aquifer-serve(1)"],
    ..Manual::NONE
};

impl Group {
    /// Runs the subcommand.
    ///
    /// # Errors
    /// If the group or its file is invalid, or if a step of the subcommand fails.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let all = self.groups.all();
        let shown = |agreement: &Agreement| shown(common, &all, agreement);
        match self.what {
            What::Create(Create { name, terms }) => {
                let what = || format!("creating group '{name}'");
                let mut agreement = Agreement::new(name.clone(), GroupEncryption::Deterministic);
                terms.apply(&mut agreement).or_fail(what)?;
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
            What::Set(Set { name, terms }) => {
                let what = || format!("changing group '{name}'");
                if terms.is_empty() {
                    let why = "give at least one term to change: see 'aquifer group set --help'\n";
                    let error = clap::Error::raw(ErrorKind::MissingRequiredArgument, why);
                    return Ok(misuse(&error, common.json));
                }
                let mut agreement = all.get(&name).or_fail(what)?;
                terms.apply(&mut agreement).or_fail(what)?;
                all.change(&agreement).or_fail(what)?;
                agreement.limit_caches(&directory(common)?).or_fail(what)?;
                output::answer(common.json, &shown(&agreement)?, text)?;
            }
            What::Rm(Which { name }) => {
                let what = || format!("removing group '{name}'");
                let agreement = shown(&all.get(&name).or_fail(what)?)?;
                if !agreement.regions.is_empty() {
                    let why = format!("it has regions here: {}", agreement.regions.join(", "));
                    return Err(Failure::new(what(), why)
                        .help("first stop their VMs, or remove them with 'aquifer region rm'"));
                }
                all.remove(&name).or_fail(what)?;
                output::answer(common.json, &agreement, |agreement| {
                    format!("{}: removed", agreement.agreement.name)
                })?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn shown(common: &Common, all: &Agreements, agreement: &Agreement) -> Result<Shown> {
    let Agreement { name, key, .. } = agreement;
    let sharing =
        aquifer_dedup::sharing(&directory(common)?, name).or_fail(|| "counting shared pages")?;
    let scanner = ScannerFiles::new(&directory(common)?, name).running();
    let scanner = scanner.or_fail(|| "finding the group's scanner")?.map(ShownScanner::from);
    let cache =
        disks::status(&directory(common)?, name).or_fail(|| "querying the group's disk cache")?;
    let regions = regions::list(&directory(common)?).or_fail(|| "listing regions")?;
    let is_in = |files: &aquifer_region::process::Files| {
        regions::record(files).is_ok_and(|spec| spec.group == *name)
    };
    let regions =
        regions.iter().filter(|files| is_in(files)).map(|files| files.name().to_string()).collect();
    let terms = agreement.public().or_fail(|| format!("showing group '{name}'"))?;
    Ok(Shown {
        key_id: key.id(),
        file: all.file(name),
        regions,
        sharing,
        scanner,
        cache,
        terms,
        agreement: agreement.clone(),
    })
}

fn text(shown: &Shown) -> String {
    let Shown { key_id, file, regions, sharing, scanner, cache, agreement, .. } = shown;
    let Agreement { name, encryption, lends, cgroup, members, limits, reprovision, .. } = agreement;
    let how = match encryption {
        GroupEncryption::Deterministic => {
            "encrypted under its key: lenders can share equal pages and tell which are equal"
        }
        GroupEncryption::Random => {
            "encrypted under a key for each lease: lenders cannot compare pages"
        }
        GroupEncryption::Off => "NOT encrypted: lenders can read them",
    };
    let or = |text: Vec<String>, none: &str| {
        if text.is_empty() { none.to_owned() } else { text.join(", ") }
    };
    let most = [
        limits.members.map(|most| format!("{most} members")),
        limits.memory.map(|most| format!("memory of {most}")),
        limits.cache.map(|most| format!("{most} of a host's RAM in their caches")),
    ];
    let surplus = format!(
        "given to VMs by policy {}, {} a period{}",
        format!("{:?}", reprovision.policy).to_lowercase(),
        reprovision.step,
        if *lends {
            "; the rest may be lent to other groups"
        } else {
            "; nothing is lent to other groups"
        }
    );
    let lines = [
        ("pages that leave a host", how.to_owned()),
        ("savings", surplus),
        ("members", or(members.clone(), "any")),
        ("limits on a host", or(most.into_iter().flatten().collect(), "none")),
        (
            "cgroup",
            cgroup.as_ref().map_or("none".to_owned(), |cgroup| cgroup.display().to_string()),
        ),
        ("key", key_id.clone()),
        ("file", file.display().to_string()),
        ("regions here", or(regions.clone(), "none")),
        ("shared here", saved(sharing)),
        ("scanner here", scanner.as_ref().map_or_else(|| "none".to_owned(), scanner_text)),
        ("disk cache here", cache.as_ref().map_or_else(|| "none".to_owned(), cache_text)),
    ];
    let lines = lines.map(|(name, text)| format!("\n  {name:<25}{text}"));
    format!("{name}{}", lines.concat())
}

fn scanner_text(ShownScanner { pid, by_agent, report }: &ShownScanner) -> String {
    let by = if *by_agent { "the agent" } else { "an operator" };
    let did = report.as_ref().map_or_else(String::new, |report| {
        let ScanReport { why, scanner_cpu_pct: cpu, passes, .. } = report;
        format!(": {why}; {passes} passes, {cpu:.0} % of a CPU")
    });
    format!("process {pid}, which {by} started{did}")
}

fn listed(groups: &[Shown]) -> String {
    let row = |Shown { key_id, regions, agreement: Agreement { name, encryption, .. }, .. }: &_| {
        let encryption = format!("{encryption:?}").to_lowercase();
        [name.to_string(), encryption, key_id.clone(), regions.len().to_string()]
    };
    table(["GROUP", "ENCRYPTION", "KEY", "REGIONS"], groups.iter().map(row))
}
