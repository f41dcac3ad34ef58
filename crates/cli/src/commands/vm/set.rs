//! `aquifer vm set`.

use std::path::PathBuf;

use aquifer_control::restart::Policy;
use aquifer_page::{Bytes, OwnerId, RegionName};
use aquifer_vm::VmError;
use aquifer_vm::definition::{Definition, DefinitionError};
use aquifer_vm::memory::{Limits, UNLIMITED};
use aquifer_vm::process::{Files, State, client};
use clap::{ArgAction, Args};
use serde::Serialize;

use super::limits;
use super::options::{self, Changes, Options};
use super::place::Place;
use crate::agent_call::Socket;
use crate::commands::region;
use crate::failure::{Failure, OrFail, Result};
use crate::output;

/// The keys of limits, which a running VM takes at once.
const LIMITS: [&str; 4] = ["min", "max", "weight", "reserve"];

/// The key of the cache's size, which a running VM takes at once.
const CACHE: &str = "cache";

/// Change a VM's definition, and what its running VM can take at once
///
/// Options that you omit keep their value; options that repeat replace all former ones. A running
/// VM takes --min, --max, --weight, --reserve and --cache at once, and the others when it starts
/// next; 'aquifer vm resize' resizes it now. To remove an option, edit the file.
///
/// For a VM without a definition, only the first four apply.
#[derive(Debug, Args)]
pub struct Set {
    /// Name of the VM
    name: RegionName,
    #[command(flatten)]
    changes: Changes,
    /// Start the VM when the host boots
    #[arg(long, value_name = "BOOL", action = ArgAction::Set, num_args = 0..=1,
        require_equals = true, default_missing_value = "true")]
    autostart: Option<bool>,
    /// When to start the VM after an end: on-failure, always or no
    #[arg(long, value_name = "POLICY")]
    restart: Option<Policy>,
}

/// The answer for a VM with a definition.
#[derive(Debug, Serialize)]
struct Changed {
    vm: RegionName,
    definition: PathBuf,
    /// The keys that count from now on.
    now: Vec<String>,
    /// The keys that count from the VM's next start.
    at_next_start: Vec<String>,
    #[serde(flatten)]
    limits: Limits,
}

impl Set {
    pub(super) fn run(self, place: &Place<'_>) -> Result<()> {
        let file = place.definitions.file(&self.name);
        match file.try_exists().unwrap_or(true) {
            true => self.change(place),
            false => self.limit(place, file),
        }
    }

    /// Sets the limits of a VM without a definition.
    fn limit(self, place: &Place<'_>, path: PathBuf) -> Result<()> {
        let Self { name, changes: Changes(given), autostart, restart } = self;
        let what = || format!("setting the limits of VM '{name}'");
        let others = given.keys().any(|key| !LIMITS.contains(&key.as_str()));
        if others || autostart.is_some() || restart.is_some() {
            return Err(DefinitionError::Unknown { name: name.clone(), path }).or_fail(what);
        }
        let files = place.files(&name);
        let before = client::status(&files).or_fail(what)?.limits;
        let limits = options::read(&given, &path)?.guest.limits_over(before);
        client::limit(&files, &limits).or_fail(what)?;
        output::answer(place.common.json, &limits, |it| format!("{name}: {}", limits::text(it)))
    }

    fn change(self, place: &Place<'_>) -> Result<()> {
        let Self { name, changes: Changes(given), autostart, restart } = self;
        let what = || format!("changing VM '{name}'");
        let held = place.definitions.hold(&name).or_fail(what)?;
        let before = held.get().or_fail(what)?;
        if let Some(elsewhere) = &before.elsewhere {
            return Err(Failure::new(what(), format!("it has {}", elsewhere.describe()))
                .help(format!("change it on host {}", elsewhere.host)));
        }
        let former = before.vm.clone();
        let mut vm = before.vm.clone();
        vm.extend(given.clone());
        let options = options::read(&vm, &held.file())?;
        let limits = options.guest.limits()?;
        let owner = options.guest.is_pooled().then(|| before.owner.unwrap_or_else(OwnerId::random));
        let after = Definition {
            vm,
            owner,
            autostart: autostart.unwrap_or(before.autostart),
            restart: restart.unwrap_or(before.restart),
            ..before
        };
        let mut now = Vec::new();
        now.extend(autostart.map(|_| "autostart".to_owned()));
        now.extend(restart.map(|_| "restart".to_owned()));
        let files = place.files(&name);
        let (applied, at_next_start): (Vec<_>, Vec<_>) = match runs(&files).or_fail(what)? {
            false => (Vec::new(), given.keys().cloned().collect()),
            true => {
                // The kind of a running VM's memory stays.
                let has_cache = files.region().region().exists();
                let keeps_cache = has_cache && options.guest.cache().is_some();
                given.keys().cloned().partition(|key| {
                    LIMITS.contains(&key.as_str()) || (key == CACHE && keeps_cache)
                })
            }
        };
        // First: if the VM refuses, the definition stays as it is.
        let limited = applied.iter().any(|key| LIMITS.contains(&key.as_str()));
        let limit = |limits: &Limits| match limited {
            true => client::limit(&files, limits).or_fail(what),
            false => Ok(()),
        };
        let resized = applied.iter().any(|key| key == CACHE);
        let resize = |options: &Options| match (resized, options.guest.cache()) {
            (true, Some(cache)) => {
                let (socket, overcommit) = (Socket::of_environment(), options.guest.overcommit());
                region::set_cache(place.common, &socket, &files.region(), cache, overcommit)
            }
            _ => Ok(()),
        };
        let undo = |undone: &dyn Fn(&Options) -> Result<()>| {
            let undone = options::read(&former, &held.file()).and_then(|former| undone(&former));
            undone.unwrap_or_else(|failure| failure.warn(place.common.json));
        };
        // No reserve stands beside a cache of a fixed size: an end of the reserve comes first, and
        // a beginning last.
        if limits.reserve == Bytes::ZERO {
            limit(&limits)?;
            resize(&options).inspect_err(|_| undo(&|former| limit(&former.guest.limits()?)))?;
        } else {
            resize(&options)?;
            limit(&limits).inspect_err(|_| undo(&resize))?;
        }
        held.write(&after).or_fail(what)?;
        now.extend(applied);
        let changed = Changed { vm: name, definition: held.file(), now, at_next_start, limits };
        output::answer(place.common.json, &changed, text)
    }
}

/// Returns whether QEMU of this VM runs.
fn runs(files: &Files) -> Result<bool, VmError> {
    match client::status(files) {
        Ok(status) => Ok(matches!(status.state, State::Qemu(_))),
        Err(VmError::Unknown(_)) => Ok(false),
        Err(error) => Err(error),
    }
}

fn text(changed: &Changed) -> String {
    let Changed { vm, definition, now, at_next_start, limits } = changed;
    let mut lines = vec![format!("{vm}: {} is changed", definition.display())];
    if !now.is_empty() {
        lines.push(format!("{} from now on", now.join(", ")));
    }
    if !at_next_start.is_empty() {
        lines.push(format!("{} from the VM's next start on", at_next_start.join(", ")));
    }
    if *limits != UNLIMITED {
        lines.push(limits::text(limits));
    }
    lines.join("\n")
}
