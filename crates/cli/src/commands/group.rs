//! `aquifer group`.

mod cluster;
mod manuals;
mod terms;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;

use aquifer_api::agreement::KnownAgreement;
use aquifer_control::group::agreements::{Edition, KeyId};
use aquifer_dedup::{RunningScanner, ScanReport, ScannerFiles, Sharing};
use aquifer_disk_cache as disks;
use aquifer_group::{Agreement, Agreements, GroupEncryption, GroupError};
use aquifer_page::{Group as Name, HostName};
use aquifer_region::process::client as regions;
use clap::error::ErrorKind;
use clap::{Args, Subcommand};
use serde::Serialize;

pub(super) use self::cluster::disputes;
pub(super) use self::manuals::MANUALS;
use self::terms::Terms;
pub(super) use self::terms::rate;
use super::region::directory;
use super::serve::{cache_text, saved};
use super::{Common, misuse};
use crate::agent_call::Socket;
use crate::failure::{Failure, OrFail, Result};
use crate::manual::Manual;
use crate::output;
use crate::table::table;

/// Manage tenants whose VMs and regions share equal pages
///
/// A file with the group's terms and its key defines a group. 'create' writes the file, and the
/// agents pass it on to the other hosts. A region or VM joins when it is created with --group.
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
    /// List the groups of the cluster that this host knows
    List,
    /// Show a group's terms, regions and savings on this host
    Show(Which),
    /// Change a group's terms, on all hosts
    ///
    /// Options that you omit keep their value. --member, --max-members, --max-memory and
    /// --encryption apply to members that join later. --max-cache applies at once. 'serve
    /// reprovision' reads its terms each period, 'serve dedup' when it starts.
    Set(Set),
    /// Remove a group, on all hosts
    ///
    /// Fails while the group has regions here. Another host that has regions of the group keeps the
    /// agreement until they are gone. Hosts keep the removed file as GROUP.KEY.toml.removed: delete
    /// it there if no page is left that its key encrypted.
    Rm(Rm),
}

#[derive(Debug, Args)]
struct Which {
    /// Name of the group
    name: Name,
}

#[derive(Debug, Args)]
struct Rm {
    /// Name of the group
    name: Name,
    /// Remove the group with this key, which this host need not have
    ///
    /// For a group whose only hosts are gone, and for one that another host made up. 'aquifer group
    /// list' shows the keys.
    #[arg(long, value_name = "ID")]
    key: Option<KeyId>,
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
    /// Replace a later version that this host lacks
    ///
    /// That version's other changes are lost. A host that lies may announce a version that does
    /// not exist.
    #[arg(long)]
    force: bool,
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
    /// The latest version that this host's agent knows of; `None` if no agent answers.
    version: Option<u64>,
    /// Whether this host has that version.
    is_latest: Option<bool>,
    /// The host where an operator made this version.
    made_on: Option<HostName>,
    /// Why an operator must choose between this group and another one of the same name.
    conflict: Option<String>,
    /// The agreement's terms.
    #[serde(flatten)]
    terms: serde_json::Value,
    #[serde(skip)]
    agreement: Agreement,
}

/// A group of the cluster that this host has no agreement of.
#[derive(Debug, Serialize)]
struct Elsewhere {
    name: Name,
    key_id: KeyId,
    version: Option<u64>,
    made_on: HostName,
    conflict: Option<String>,
}

/// A line of the list of groups.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Listed {
    Here(Box<Shown>),
    Elsewhere(Elsewhere),
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
            "Create a group; the cluster's other hosts get its agreement from this one",
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
        let (groups, all) = (self.groups.clone(), self.groups.all());
        let shown = |agreement: &Agreement| {
            let known = groups.known(common)?;
            shown(common, &all, agreement, &known)
        };
        match self.what {
            What::Create(Create { name, terms }) => {
                let what = || format!("creating group '{name}'");
                let mut agreement = Agreement::new(name.clone(), GroupEncryption::Deterministic);
                terms.apply(&mut agreement).or_fail(what)?;
                let socket = Socket::of_environment();
                let known = groups.ask_agent(common, &socket, (&name, false))?;
                let known = known.filter(|known| !known.found);
                if let Some(by) = known.and_then(|known| known.known_by) {
                    return Err(elsewhere(what(), &name, &by));
                }
                all.create(&agreement).or_fail(what)?;
                groups.ask_agent(common, &socket, (&name, false))?;
                output::answer(common.json, &shown(&agreement)?, text)?;
            }
            What::List => {
                let here = all.all().or_fail(|| "listing groups")?;
                let known = groups.known(common)?;
                let shown = here.iter().map(|agreement| {
                    Ok(Listed::Here(Box::new(self::shown(common, &all, agreement, &known)?)))
                });
                let mut listed = shown.collect::<Result<Vec<_>>>()?;
                listed.extend(not_here(&here, &known));
                output::answer(common.json, &listed, |listed| table_of(listed))?;
            }
            What::Show(Which { name }) => {
                let what = || format!("showing group '{name}'");
                let known = groups.known(common)?;
                let shown = match all.find(&name).or_fail(what)? {
                    Some(agreement) => {
                        let shown = self::shown(common, &all, &agreement, &known)?;
                        vec![Listed::Here(Box::new(shown))]
                    }
                    None => not_here(&[], &known).filter(|listed| listed.name() == &name).collect(),
                };
                let Some(first) = shown.first() else {
                    return Err(Failure::new(what(), GroupError::Unknown(name)));
                };
                match first {
                    Listed::Here(shown) => output::answer(common.json, &**shown, text)?,
                    Listed::Elsewhere(_) => output::answer(common.json, &shown, |it| table_of(it))?,
                }
            }
            What::Set(Set { name, force, terms }) => {
                let what = || format!("changing group '{name}'");
                if terms.is_empty() {
                    let why = "give at least one term to change: see 'aquifer group set --help'\n";
                    let error = clap::Error::raw(ErrorKind::MissingRequiredArgument, why);
                    return Ok(misuse(&error, common.json));
                }
                let socket = Socket::of_environment();
                let asked = groups.ask_agent(common, &socket, (&name, true))?;
                let known = asked.map_or_else(|| Ok(Vec::new()), |_| groups.known(common))?;
                let lock = all.lock().or_fail(what)?;
                let here = all.to_join(&name).or_fail(what)?;
                let before =
                    here.ok_or_else(|| Failure::new(what(), GroupError::Unknown(name.clone())))?;
                let mut agreement = before.clone();
                terms.apply(&mut agreement).or_fail(what)?;
                if agreement.encryption.is_weaker_than(before.encryption) {
                    return Err(weaker(what(), &before, &agreement));
                }
                if let Some((latest, by)) = later(&before, &known) {
                    if !force {
                        return Err(not_latest(what(), &name, (latest, by)));
                    }
                    all.overrule(&name, latest, by.clone()).or_fail(what)?;
                }
                all.change(&agreement).or_fail(what)?;
                drop(lock);
                groups.ask_agent(common, &socket, (&name, false))?;
                agreement.limit_caches(&directory(common)?).or_fail(what)?;
                output::answer(common.json, &shown(&agreement)?, text)?;
            }
            What::Rm(Rm { name, key }) => {
                let what = || format!("removing group '{name}'");
                let here = all.find(&name).or_fail(what)?;
                if let Some(key) = key
                    && here.is_none_or(|here| here.key.id() != key.to_string())
                {
                    let known = groups.known(common)?;
                    let known = not_here(&[], &known).find(|it| it.is_of(&name, key));
                    let known = known.ok_or_else(|| unknown_key(what(), key))?;
                    all.forget(&name, key).or_fail(what)?;
                    let _ = groups.ask_agent(common, &Socket::of_environment(), (&name, false));
                    output::answer(common.json, &known, |_| {
                        format!("{name} with key {key}: removed")
                    })?;
                    return Ok(ExitCode::SUCCESS);
                }
                let agreement = shown(&all.get(&name).or_fail(what)?)?;
                if !agreement.regions.is_empty() {
                    let why = format!("it has regions here: {}", agreement.regions.join(", "));
                    return Err(Failure::new(what(), why)
                        .help("first stop their VMs, or remove them with 'aquifer region rm'"));
                }
                all.remove(&name).or_fail(what)?;
                // The agent tells the other hosts. That hosts have other groups of that name is
                // no failure of this command.
                let _ = groups.ask_agent(common, &Socket::of_environment(), (&name, false));
                output::answer(common.json, &agreement, |agreement| {
                    format!("{}: removed", agreement.agreement.name)
                })?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn elsewhere(what: String, name: &Name, by: &HostName) -> Failure {
    Failure::new(what, format!("the cluster has a group '{name}', made on host {by}")).help(format!(
        "change it with 'aquifer group set {name}', or remove it with 'aquifer group rm {name}', \
         on a host that has it; if none has it, use 'aquifer group rm {name} --key ID' here"
    ))
}

fn unknown_key(what: String, key: KeyId) -> Failure {
    Failure::new(what, format!("this host's agent knows no such group with key {key}"))
        .help("'aquifer group list' shows the keys; the agent must run")
}

/// Returns the version that this host lacks, and the host where an operator made it.
fn later<'a>(here: &Agreement, known: &'a [KnownAgreement]) -> Option<(Edition, &'a HostName)> {
    let mut known = known.iter().filter(|known| known.group == here.name && !known.held);
    let later = known.find(|known| is_key(here, known))?;
    Some((later.edition?, &later.by))
}

fn not_latest(what: String, name: &Name, (latest, by): (Edition, &HostName)) -> Failure {
    let version = latest.version;
    Failure::new(what, format!("this host lacks its version {version}, made on host {by}")).help(
        format!(
            "change it on host {by}, where 'aquifer group set {name} --host' also lets this host \
             have it; or use --force here to replace that version"
        ),
    )
}

fn weaker(what: String, before: &Agreement, after: &Agreement) -> Failure {
    let (was, is) = (before.encryption, after.encryption);
    Failure::new(what, format!("--encryption {is} is weaker than {was}, and other hosts refuse it"))
        .help("create another group with 'aquifer group create', for new VMs")
}

impl Listed {
    fn is_of(&self, name: &Name, key: KeyId) -> bool {
        matches!(self, Self::Elsewhere(it) if it.name == *name && it.key_id == key)
    }

    fn name(&self) -> &Name {
        match self {
            Self::Here(shown) => &shown.agreement.name,
            Self::Elsewhere(elsewhere) => &elsewhere.name,
        }
    }
}

/// Returns the groups that no operator removed, and that this host has no agreement of.
fn not_here(here: &[Agreement], known: &[KnownAgreement]) -> impl Iterator<Item = Listed> {
    let is_here = |known: &KnownAgreement| {
        here.iter().any(|here| here.name == known.group && is_key(here, known))
    };
    let elsewhere = known.iter().filter(move |known| !is_here(known));
    elsewhere.filter_map(|known| {
        Some(Listed::Elsewhere(Elsewhere {
            name: known.group.clone(),
            key_id: known.key_id,
            version: Some(known.edition?.version),
            made_on: known.by.clone(),
            conflict: conflict(known),
        }))
    })
}

fn is_key(agreement: &Agreement, known: &KnownAgreement) -> bool {
    agreement.key.id() == known.key_id.to_string()
}

fn conflict(known: &KnownAgreement) -> Option<String> {
    let problem = known.conflict.as_ref()?;
    let help = problem.help.as_ref().map(|help| format!(": {help}")).unwrap_or_default();
    Some(format!("{}{help}", problem.error))
}

fn shown(
    common: &Common,
    all: &Agreements,
    agreement: &Agreement,
    known: &[KnownAgreement],
) -> Result<Shown> {
    let Agreement { name, key, .. } = agreement;
    let known = known.iter().find(|known| known.group == *name && is_key(agreement, known));
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
        version: known.and_then(|known| Some(known.edition?.version)),
        is_latest: known.map(|known| known.held),
        made_on: known.map(|known| known.by.clone()),
        conflict: known.and_then(conflict),
        terms,
        agreement: agreement.clone(),
    })
}

fn text(shown: &Shown) -> String {
    let Shown { key_id, file, regions, sharing, scanner, cache, agreement, .. } = shown;
    let Agreement { name, encryption, lends, cgroup, members, hosts, limits, reprovision, .. } =
        agreement;
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
        ("hosts", or(hosts.clone(), "all of the cluster")),
        ("version", version_text(shown)),
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
    let conflict = shown.conflict.as_ref().map(|conflict| ("CONFLICT", conflict.clone()));
    let lines = lines.into_iter().chain(conflict);
    let lines = lines.map(|(name, text)| format!("\n  {name:<25}{text}"));
    format!("{name}{}", lines.collect::<String>())
}

fn version_text(shown: &Shown) -> String {
    match (shown.version, &shown.made_on) {
        (None, Some(by)) => format!("removed on host {by}; stays until its regions are gone"),
        (Some(version), Some(by)) => {
            let has =
                if shown.is_latest == Some(true) { "" } else { "; this host has another one" };
            format!("{version}, made on host {by}{has}")
        }
        _ => "unknown, because no agent tells it".to_owned(),
    }
}

fn scanner_text(ShownScanner { pid, by_agent, report }: &ShownScanner) -> String {
    let by = if *by_agent { "the agent" } else { "an operator" };
    let did = report.as_ref().map_or_else(String::new, |report| {
        let ScanReport { why, scanner_cpu_pct: cpu, passes, .. } = report;
        format!(": {why}; {passes} passes, {cpu:.0} % of a CPU")
    });
    format!("process {pid}, which {by} started{did}")
}

fn table_of(groups: &[Listed]) -> String {
    let or_dash = |version: Option<u64>| version.map_or("-".to_owned(), |it| it.to_string());
    let row = |listed: &Listed| match listed {
        Listed::Here(shown) => {
            let Shown { key_id, regions, version, agreement, conflict, .. } = &**shown;
            let encryption = agreement.encryption.to_string();
            let name = agreement.name.to_string() + mark(conflict);
            [name, or_dash(*version), encryption, key_id.clone(), regions.len().to_string()]
        }
        Listed::Elsewhere(Elsewhere { name, key_id, version, made_on, conflict }) => [
            name.to_string() + mark(conflict),
            or_dash(*version),
            format!("on {made_on}"),
            key_id.to_string(),
            "not here".to_owned(),
        ],
    };
    let rows = table(["GROUP", "VERSION", "ENCRYPTION", "KEY", "REGIONS"], groups.iter().map(row));
    let conflict = |listed: &Listed| match listed {
        Listed::Here(shown) => shown.conflict.clone(),
        Listed::Elsewhere(elsewhere) => elsewhere.conflict.clone(),
    };
    let conflicts: BTreeSet<_> = groups.iter().filter_map(conflict).collect();
    conflicts.into_iter().fold(rows, |text, conflict| format!("{text}\n! {conflict}"))
}

fn mark(conflict: &Option<String>) -> &'static str {
    if conflict.is_some() { " !" } else { "" }
}
