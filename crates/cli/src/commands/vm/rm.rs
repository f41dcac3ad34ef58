//! `aquifer vm rm`.

use std::time::Duration;

use aquifer_page::RegionName;
use aquifer_vm::VmError;
use aquifer_vm::definition::DefinitionError;
use aquifer_vm::process::{State, client};
use clap::Args;

use super::Done;
use super::place::Place;
use crate::failure::{Failure, OrFail, Result};
use crate::output;

/// Remove a VM's definition; its disks stay
///
/// Refuses while the VM runs.
#[derive(Debug, Args)]
pub struct Rm {
    /// Name of the VM
    name: RegionName,
    /// End a running VM at once, like a power cut, and remove it
    #[arg(long)]
    force: bool,
}

impl Rm {
    pub(super) fn run(self, place: &Place<'_>) -> Result<()> {
        let Self { name, force } = self;
        let what = || format!("removing VM '{name}'");
        let path = place.definitions.file(&name);
        if path.symlink_metadata().is_err() {
            return Err(DefinitionError::Unknown { name: name.clone(), path }).or_fail(what);
        }
        let held = place.definitions.hold(&name).or_fail(what)?;
        let files = place.files(&name);
        match client::status(&files) {
            Err(VmError::Unknown(_)) => {}
            Err(error) if !force => return Err(error).or_fail(what),
            Ok(status) if matches!(status.state, State::Qemu(_)) && !force => {
                return Err(Failure::new(what(), "it runs")
                    .help(format!("run 'aquifer vm stop {name}' first, or end it with --force")));
            }
            Ok(_) | Err(_) => client::stop(&files, true, Duration::ZERO).or_fail(what)?,
        }
        held.remove().or_fail(what)?;
        files.end_rest().or_fail(what)?;
        let done = Done { vm: name, done: "removed" };
        output::answer(place.common.json, &done, |is| format!("{} {}", is.vm, is.done))
    }
}
