//! `aquifer group`.

mod balance;
mod cache;
mod manuals;
mod scan;
mod terms;

use std::path::PathBuf;
use std::process::ExitCode;

use aquifer_group::cache as disks;
use aquifer_group::scan::Sharing;
use aquifer_group::{Agreement, Agreements, Sealed};
use aquifer_page::Group as Name;
use aquifer_region::process::client as regions;
use clap::error::ErrorKind;
use clap::{Args, Subcommand};
use serde::Serialize;

use self::balance::Balance;
pub(super) use self::manuals::MANUALS;
use self::scan::{Scan, saved};
use self::terms::Terms;
use super::Common;
use super::region::directory;
use crate::failure::{Failure, OrFail, Result};
use crate::manual::Manual;
use crate::output;

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
    /// Returns the agreements in this directory.
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
    Scan(Scan),
    Balance(Balance),
    Cache(cache::Cache),
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
    #[command(flatten)]
    terms: Terms,
}

#[derive(Debug, Args)]
struct Set {
    /// The group
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
    /// The state of the group's disk cache; `None` if it does not run here.
    cache: Option<disks::Status>,
    /// The agreement's terms.
    #[serde(flatten)]
    terms: serde_json::Value,
    #[serde(skip)]
    agreement: Agreement,
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
            "aquifer group balance",
            "Gives what groups save to their VMs that need it; see --min of 'aquifer vm start'",
        ),
        (
            "aquifer group set blue --policy fair --lends yes --max-memory 64G",
            "Who gets what is saved, whether other groups may have what is left, and what its members may have on a host",
        ),
        (
            "aquifer group cache blue --size 2G",
            "Keeps what the group's VMs read from their disks in at most 2 GiB of memory; for VMs that are started with --cached-disk",
        ),
        (
            "aquifer group cache blue --lender nbds://b.example.org:10811/ --tls /etc/aquifer/tls",
            "What leaves that memory goes to host b, where the group's cache runs with --lend 192.0.2.2:10811 --tls /etc/aquifer/tls; a guest whose swap is on such a disk swaps to b",
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
            "Cache of disks",
            "'cache' serves the disks of VMs that are started with 'vm start --group NAME --cached-disk FILE', as long as it runs. A size of 0 caches nothing: all is read \
         from the disk. What it caches is clean, and gone at once when it is to be smaller. What guests write is on the disk when they are told so, no less than \
         without it; it can be killed and started again, and they wait meanwhile, for as long as it takes. A disk is written by one VM, or read by any number; \
         QEMU without it cannot open what it has open. Beside its pages it takes about 1/50 of their size to know which they are, and up to 33 MiB for each connection. \
         If the kernel ends it for want of memory nothing is lost, but its guests stand still until it is started again: have systemd do that (Restart=always), \
         and give it an OOMScoreAdjust of its own.",
        ),
        (
            "Keys",
            "Whoever has a group's file can read what its members have with lenders, and nothing of other groups. Leases keep the key that they were made with: \
         'set' and 'rm' change nothing for regions and VMs that are there.",
        ),
    ],
    files: &[
        (
            "/run/aquifer/regions/@NAME/cache.nbd",
            "the disks, by NBD; an export is named by its path, with ro: before it if it is only to be read",
        ),
        (
            "/run/aquifer/regions/@NAME/cache.control",
            "for whoever tells it what it may have, such as 'group balance'",
        ),
    ],
    see_also: &["aquifer-region(1)", "aquifer-vm(1)", "aquifer-export(1)"],
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
                let what = || format!("making group '{name}'");
                let mut agreement = Agreement::new(name.clone(), Sealed::Deterministic);
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
                    let why =
                        "nothing is said of what is to change: see 'aquifer group set --help'\n";
                    clap::Error::raw(ErrorKind::MissingRequiredArgument, why).exit();
                }
                let mut agreement = all.get(&name).or_fail(what)?;
                terms.apply(&mut agreement).or_fail(what)?;
                all.change(&agreement).or_fail(what)?;
                agreement.limit_caches(&directory(common)?).or_fail(what)?;
                output::answer(common.json, &shown(&agreement)?, text)?;
            }
            What::Balance(balance) => balance.run(common, all)?,
            What::Scan(scan) => scan.run(common, &all)?,
            What::Cache(cache) => cache.run(common, &all)?,
            What::Rm(Which { name }) => {
                let what = || format!("removing group '{name}'");
                let agreement = shown(&all.get(&name).or_fail(what)?)?;
                if !agreement.regions.is_empty() {
                    let why = format!("there are regions in it: {}", agreement.regions.join(", "));
                    return Err(Failure::new(what(), why)
                        .help("stop their VMs, or 'aquifer region rm' them, first"));
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
    let sharing = aquifer_group::scan::sharing(&directory(common)?, name)
        .or_fail(|| "counting what is shared")?;
    let cache =
        disks::status(&directory(common)?, name).or_fail(|| "asking the cache of its disks")?;
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
        cache,
        terms,
        agreement: agreement.clone(),
    })
}

fn text(shown: &Shown) -> String {
    let Shown { key_id, file, regions, sharing, cache, agreement, .. } = shown;
    let Agreement { name, sealed, lends, cgroup, members, limits, reprovision, .. } = agreement;
    let how = match sealed {
        Sealed::Deterministic => {
            "sealed under its key: lenders can keep equal pages once, and tell which are equal"
        }
        Sealed::Random => {
            "sealed under a key for each lease: lenders can tell nothing of two pages"
        }
        Sealed::Off => "NOT sealed: lenders can read them",
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
        "goes to VMs by {}, {} a second{}",
        format!("{:?}", reprovision.policy).to_lowercase(),
        reprovision.step,
        if *lends {
            "; what is left may be lent to other groups"
        } else {
            "; none of it to other groups"
        }
    );
    let lines = [
        ("pages that leave a host", how.to_owned()),
        ("what sharing saves", surplus),
        ("members", or(members.clone(), "whoever joins")),
        ("together on a host", or(most.into_iter().flatten().collect(), "as much as there is")),
        (
            "cgroup",
            cgroup.as_ref().map_or("none".to_owned(), |cgroup| cgroup.display().to_string()),
        ),
        ("key", key_id.clone()),
        ("file", file.display().to_string()),
        ("regions here", or(regions.clone(), "none")),
        ("kept once here", saved(sharing)),
        ("its disks' cache here", cache.as_ref().map_or_else(|| "none".to_owned(), cache::text)),
    ];
    let lines = lines.map(|(name, text)| format!("\n  {name:<25}{text}"));
    format!("{name}{}", lines.concat())
}

fn listed(groups: &[Shown]) -> String {
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["GROUP", "SEALED", "KEY", "REGIONS"]);
    for Shown { key_id, regions, agreement: Agreement { name, sealed, .. }, .. } in groups {
        let sealed = format!("{sealed:?}").to_lowercase();
        table.add_row([name.to_string(), sealed, key_id.clone(), regions.len().to_string()]);
    }
    table.to_string()
}
