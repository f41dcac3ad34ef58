//! `aquifer vm create`.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use aquifer_control::restart::Policy;
use aquifer_page::RegionName;
use aquifer_vm::definition::{Definition, DefinitionError};
use aquifer_vm::process::client;
use aquifer_vm::{VmError, definition::Held};
use clap::{ArgAction, Args};
use serde::Serialize;

use super::options::{self, Complete};
use super::place::Place;
use super::start::start;
use crate::failure::{Failure, OrFail, Result};
use crate::output;

/// Define a VM, and start it
///
/// Writes the definition VM_DIR/NAME.toml, and starts the VM. This host's agent starts the VM again
/// when the host boots, and when QEMU fails. --memory suffices; arguments after '--' go to QEMU.
///
/// By default the VM's memory is a region. All of it begins in RAM of this host; while the host is
/// short of memory, its agent borrows from other hosts, and moves cold pages there. --cache SIZE
/// fixes the RAM that the region takes here, and --lender names its lenders.
#[derive(Debug, Args)]
pub struct Create {
    /// Name of the VM, of its definition and of its region
    name: RegionName,
    #[command(flatten)]
    options: Complete,
    /// Start the VM when the host boots
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set,
        num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    autostart: bool,
    /// When to start the VM after an end: on-failure, always or no
    ///
    /// No policy restarts a VM that 'aquifer vm stop' ended. With on-failure, a guest that powers
    /// itself off stays off, too.
    #[arg(long, value_name = "POLICY", default_value_t = Policy::default())]
    restart: Policy,
    /// Write the definition only
    #[arg(long)]
    no_start: bool,
}

/// The answer if the VM does not start.
#[derive(Debug, Serialize)]
struct Created {
    vm: RegionName,
    definition: PathBuf,
}

impl Create {
    pub(super) fn run(self, place: &Place<'_>) -> Result<()> {
        let Self { name, options: Complete(options), autostart, restart, no_start } = self;
        let what = || format!("creating VM '{name}'");
        options.guest.limits()?;
        let held = place.definitions.hold(&name).or_fail(what)?;
        let definition = Definition { autostart, restart, ..options::definition(&name, &options) };
        define(place, &held, &definition).or_fail(what)?;
        if autostart || restart != Policy::No {
            warn_without_agent(place, &name);
        }
        let file = held.file();
        if no_start {
            let created = Created { vm: name, definition: file };
            return output::answer(place.common.json, &created, |is| {
                format!("{} is defined in {}", is.vm, is.definition.display())
            });
        }
        let status = start(place, &held, &definition, options.guest).map_err(|failure| {
            let help = format!(
                "the definition stays: change it with 'aquifer vm set {name}', then run \
                 'aquifer vm start {name}', or remove it with 'aquifer vm rm {name}'"
            );
            failure.or_help(help)
        })?;
        output::answer(place.common.json, &status, |status| {
            super::text(&place.files(&name), status)
        })
    }
}

/// Writes the definition of a VM that is to stay off for the moment.
fn define(place: &Place<'_>, held: &Held, definition: &Definition) -> Result<(), VmError> {
    let (name, path) = (held.name().clone(), held.file());
    if path.try_exists().unwrap_or(true) {
        return Err(DefinitionError::Exists { name, path }.into());
    }
    let files = place.files(&name);
    if !matches!(client::status(&files), Err(VmError::Unknown(_))) {
        return Err(VmError::Exists(name));
    }
    // First: an agent starts what is defined and not at rest.
    files.rest("aquifer vm create")?;
    held.create(definition).inspect_err(|_| _ = files.end_rest())?;
    Ok(())
}

/// Warns if no agent is there to start the VM.
fn warn_without_agent(place: &Place<'_>, name: &RegionName) {
    let socket = place.run_dir.join("agent.sock");
    if let Err(error) = UnixStream::connect(&socket) {
        let why = format!(
            "no agent answers at {} ({error}): nothing starts the VM at boot or after a failure",
            socket.display()
        );
        Failure::new(format!("creating VM '{name}'"), why)
            .help("run this host's agent ('aquifer serve agent')")
            .warn(place.common.json);
    }
}
