//! `aquifer group`.

use std::path::PathBuf;
use std::process::ExitCode;

use aquifer_group::{Agreement, Agreements, Sealed};
use aquifer_page::Group as Name;
use aquifer_region::process::client as regions;
use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use super::Common;
use super::region::directory;
use crate::failure::{Failure, OrFail, Result};
use crate::manual::Manual;
use crate::output;

/// Tenants: VMs and regions whose pages may be shared with each other, and with no one else's
///
/// A group is a file that all hosts of the group have. 'create' makes it with a key of the group's own; copy it to the other hosts.
/// A region or VM joins when it is made, by --group.
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
    #[arg(long, value_name = "WAY")]
    sealed: SealedName,
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
            "aquifer group set blue --sealed random",
            "For tenants to whom it matters that a lender can tell which pages are equal",
        ),
    ],
    notes: &[(
        "Keys",
        "Whoever has a group's file can read what its members have with lenders, and nothing of other groups. Leases keep the key that they were made with: \
         'set' and 'rm' change nothing for regions and VMs that are there.",
    )],
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
            What::Set(Set { name, sealed }) => {
                let what = || format!("changing group '{name}'");
                let agreement = Agreement { sealed: sealed.into(), ..all.get(&name).or_fail(what)? };
                all.change(&agreement).or_fail(what)?;
                output::answer(common.json, &shown(&agreement)?, text)?;
            }
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

fn shown(common: &Common, all: &Agreements, agreement: &Agreement) -> Result<Shown> {
    let Agreement { name, sealed, key } = agreement;
    let regions = regions::list(&directory(common)?).or_fail(|| "listing regions")?;
    let is_in =
        |files: &aquifer_region::process::Files| regions::record(files).is_ok_and(|spec| spec.group == *name);
    let regions = regions.iter().filter(|files| is_in(files)).map(|files| files.name().to_string()).collect();
    Ok(Shown { name: name.clone(), sealed: *sealed, key_id: key.id(), file: all.file(name), regions })
}

fn text(shown: &Shown) -> String {
    let Shown { name, sealed, key_id, file, regions } = shown;
    let how = match sealed {
        Sealed::Deterministic => {
            "sealed under its key: lenders can keep equal pages once, and tell which are equal"
        }
        Sealed::Random => "sealed under a key for each lease: lenders can tell nothing of two pages",
        Sealed::Off => "NOT sealed: lenders can read them",
    };
    let regions = if regions.is_empty() { "none".to_owned() } else { regions.join(", ") };
    format!(
        "{name}\n  pages that leave a host  {how}\n  key                      {key_id}\n  file                     {}\n  regions here             {regions}",
        file.display()
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
