//! `aquifer vm start`.

use aquifer_control::restart::Seen;
use aquifer_page::RegionName;
use aquifer_vm::definition::{Definition, Held};
use aquifer_vm::process::{VmStatus, client};
use clap::Args;

use super::guest::{By, Guest};
use super::options::{self, Options};
use super::place::Place;
use crate::failure::{Failure, OrFail, Result};
use crate::lender::PastOwner;
use crate::output;

/// The options that also apply to one start of a VM with a definition.
const ONCE: [&str; 2] = ["take_over", "overcommit"];

/// Start a VM in the background, by its definition or without one
///
/// With the name alone it starts a VM that 'aquifer vm create' defined. With --memory it starts a
/// transient VM: when that VM ends, this host forgets all but its disks.
///
/// Returns when QEMU runs. The VM has a serial port, a balloon, a port for 'aquifer-guest run', the
/// named disks, and no other device: no network and no display. Arguments after '--' go to QEMU.
///
/// By default the VM's memory is a region. All of it begins in RAM of this host; while the host is
/// short of memory, its agent borrows from other hosts, and moves cold pages there. --cache SIZE
/// fixes the RAM that the region takes here, and --lender names its lenders.
#[derive(Debug, Args)]
pub struct Start {
    /// Name of the VM and of its region
    name: RegionName,
    #[command(flatten)]
    options: Options,
    /// Start a VM that moved, even if another host may own it
    ///
    /// Use this only if the VM does not run there and never will: two running copies corrupt its
    /// disks.
    #[arg(long)]
    force: bool,
    /// Start the VM only if it does not run and no operator has stopped it
    #[arg(long, hide = true)]
    if_wanted: bool,
}

impl Start {
    pub(super) fn run(self, place: &Place<'_>) -> Result<()> {
        let name = self.name.clone();
        let status = match self.options.given.keys().any(|key| !ONCE.contains(&key.as_str())) {
            true => Some(self.start_transient(place)?),
            false => self.start_defined(place)?,
        };
        let Some(status) = status else { return Ok(()) };
        output::answer(place.common.json, &status, |status| {
            super::text(&place.files(&name), status)
        })
    }

    fn start_transient(self, place: &Place<'_>) -> Result<VmStatus> {
        let name = &self.name;
        let what = || format!("starting VM '{name}'");
        let file = place.definitions.file(name);
        if file.try_exists().unwrap_or(true) {
            let why = format!("{} defines it, and options would contradict that", file.display());
            return Err(Failure::new(what(), why).help(format!(
                "run 'aquifer vm start {name}' without options; change them with \
                 'aquifer vm set {name}'"
            )));
        }
        if !self.options.given.contains_key("memory") {
            let why = "a VM without a definition needs --memory";
            return Err(Failure::new(what(), why).help(format!(
                "give --memory SIZE, or define the VM with 'aquifer vm create {name}'"
            )));
        }
        self.options.guest.start(place.common, &place.run_dir, name, None)
    }

    /// Returns `None` if the VM is not to start.
    fn start_defined(self, place: &Place<'_>) -> Result<Option<VmStatus>> {
        let Self { name, options, force, if_wanted } = self;
        let what = || format!("starting VM '{name}'");
        place
            .definitions
            .get(&name)
            .or_fail(what)
            .map_err(|failure| failure.or_help("or start a transient VM with --memory SIZE"))?;
        let held = place.definitions.hold(&name).or_fail(what)?;
        let definition = held.get().or_fail(what)?;
        let seen = place.files(&name).look(&[]);
        if if_wanted && !matches!(seen, Seen::Never | Seen::Ended(_)) {
            return Ok(None);
        }
        refuse_elsewhere(&definition, force)?;
        let mut vm = definition.vm.clone();
        vm.extend(options.given);
        let guest = options::read(&vm, &held.file())?.guest;
        let status = start(place, &held, &definition, guest)?;
        // It runs here now, by its record.
        held.settle(&place.files(&name)).or_fail(what)?;
        Ok(Some(status))
    }
}

fn refuse_elsewhere(definition: &Definition, force: bool) -> Result<()> {
    let Some(elsewhere) = definition.elsewhere.as_ref().filter(|_| !force) else { return Ok(()) };
    let Definition { name, .. } = definition;
    let host = &elsewhere.host;
    let why = format!("it has {}, and host {host} may own it", elsewhere.describe());
    Err(Failure::new(format!("starting VM '{name}'"), why).help(format!(
        "run 'aquifer vm show {name}' on host {host}. Only if the VM does not run there and never \
         will, run 'aquifer vm start {name} --force' here"
    )))
}

/// Starts the VM of a definition that the caller holds, and removes what an earlier QEMU of it
/// left.
///
/// # Errors
/// If the VM runs or does not start. A VM that was to stay off then still is.
pub(super) fn start(
    place: &Place<'_>,
    held: &Held,
    definition: &Definition,
    guest: Guest,
) -> Result<VmStatus> {
    let name = held.name();
    let what = || format!("starting VM '{name}'");
    let files = place.files(name);
    client::clear(&files).or_fail(what)?;
    let was_at_rest = files.is_at_rest();
    // First: even if this command dies, a VM that runs must not be at rest.
    files.end_rest().or_fail(what)?;
    let owner = definition.owner.map(|id| PastOwner { id, generation: definition.moves });
    let by = By { file: &held.file(), owner };
    let started = guest.start(place.common, &place.run_dir, name, Some(by));
    if started.is_err() && was_at_rest {
        files.rest("aquifer vm start failed").or_fail(what)?;
    }
    started
}
