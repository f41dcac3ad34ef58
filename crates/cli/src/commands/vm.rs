//! `aquifer vm`.

mod adopt;
mod budget;
mod create;
mod defined;
mod ended;
mod guest;
mod limits;
mod manuals;
mod migrate;
mod options;
mod place;
mod resize;
mod rm;
mod set;
mod start;

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use aquifer_page::{Bytes, RegionName};
use aquifer_vm::memory::Share;
use aquifer_vm::process::client::{self, Resumed};
use aquifer_vm::process::{Files, Origin, State, VmStatus};
use aquifer_vm::{Backing, VmError};
use clap::{Args, Subcommand};
use serde::Serialize;

use defined::Defined;
pub use guest::AcceleratorName;
pub(super) use manuals::MANUALS;
use place::{Place, VmDir};
pub(super) use place::{VM_DIR, VM_DIR_VARIABLE};
use resize::Spreads;

use super::Common;
use super::region;
use crate::failure::{Failure, OrFail, Result};
use crate::manual::Manual;
use crate::output;
use crate::progress::Progress;
use crate::table::table;

/// Manage VMs with elastic memory
///
/// By default a VM's memory is a region with the VM's name, which exists while the VM runs, and
/// begins in RAM of this host. --cache SIZE limits that RAM; with --cache none the memory is QEMU's
/// own. The distribution's QEMU runs the VM. The guest frees memory through its
/// balloon device, which also reports free pages.
#[derive(Debug, Args)]
pub struct Vm {
    #[command(subcommand)]
    what: What,
    #[command(flatten)]
    dir: VmDir,
}

#[derive(Debug, Subcommand)]
enum What {
    Create(Box<create::Create>),
    Start(Box<start::Start>),
    /// List the VMs of this host
    List(List),
    /// Show a VM's state and where its memory is
    Show(Which),
    Resize(resize::Resize),
    Set(Box<set::Set>),
    Rm(rm::Rm),
    ShowBudget(budget::ShowBudget),
    SetBudget(budget::SetBudget),
    Adopt(adopt::Adopt),
    /// Stop managing an adopted VM, which keeps running
    Forget(Which),
    Migrate(migrate::Migrate),
    Resume(Resume),
    Stop(Stop),
}

// The help is that of the command that takes this struct.
#[derive(Debug, Args)]
#[expect(missing_docs, reason = "a text here would take the place of the commands' own")]
pub struct Which {
    /// Name of the VM
    name: RegionName,
}

// The help is that of the command that takes this struct.
#[derive(Debug, Args)]
#[expect(missing_docs, reason = "a text here would take the place of the command's own")]
pub struct List {
    /// List defined VMs that are off too, and the last hundred ends, with time and cause
    #[arg(long)]
    all: bool,
}

/// Resume a paused VM
///
/// Also resumes a VM whose migration was interrupted, and restarts a supervisor that was killed.
#[derive(Debug, Args)]
pub struct Resume {
    /// Name of the VM
    name: RegionName,
    /// Resume even if another host may own the VM
    ///
    /// Use this only if the VM does not run there and never will: two running copies corrupt its
    /// disks.
    #[arg(long)]
    force: bool,
}

/// Power a VM off; its disks and its definition stay
///
/// A VM with a definition stays off until 'aquifer vm start', or until the host boots.
///
/// Asks the guest to power itself off, and removes the VM's sockets, logs and region. Does the same
/// for a VM whose QEMU has ended.
#[derive(Debug, Args)]
pub struct Stop {
    /// Name of the VM
    name: RegionName,
    /// End it at once, like a power cut; the guest may lose data
    #[arg(long)]
    force: bool,
    /// How long to wait for the guest to power itself off
    #[arg(long, value_name = "TIME", default_value = "60s",
        value_parser = humantime::parse_duration)]
    timeout: Duration,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        (
            "aquifer vm create db --memory 8G --disk db.qcow2",
            "Define a VM of 8 GiB and start it, now and at each boot",
        ),
        (
            "aquifer vm start db --memory 8G --cache 2G \
             --lender nbds://b/ --tls DIR --disk db.qcow2",
            "Start a transient VM of 8 GiB with at most 2 GiB of local RAM",
        ),
        ("aquifer vm show db", "Show its state, where its memory is, and fault times"),
        ("aquifer region resize db --cache 1G", "Free half of its local RAM now"),
        ("socat - unix:/run/aquifer/vms/db/serial", "Connect to its serial port"),
        ("aquifer vm migrate db --to c", "Migrate it to host c, a peer of this host"),
        ("aquifer vm stop db", "Power it off"),
    ],
    notes: &[
        (
            "Lifetime",
            "The VM runs in the background until it powers itself off or is stopped. Then its \
             region and its memory at lenders are freed. If the engine dies, another one takes \
             over. If a lender is unreachable, virtual CPUs that touch its pages wait.",
        ),
        (
            "Migration",
            "Both hosts must run agents that are peers, and the destination's agent needs \
             'accept = true' under [vms]. Both hosts must reach the VM's lenders, and its disks at \
             the same paths. Pages at lenders stay there; dirty pages of the cache and device \
             state move. A VM without lenders takes all its memory along. Until the VM runs at the \
             destination, ^C or a failure leaves it here, untouched. The source records the \
             hand-over, then tells the destination. If the link drops at that moment, the VM \
             stays paused there until the hosts connect again, or an operator decides ('vm \
             resume --force').",
        ),
        (
            "Limits",
            "Not supported: host devices that write to guest memory (vfio, vhost-user, \
             vhost-vdpa), locked memory (-overcommit mem-lock=on), and direct I/O. Disks use this \
             host's page cache, whatever cache= says, or the group's cache with --cached-disk \
             ('serve disk-cache').",
        ),
        (
            "Requirements",
            "The requirements of 'aquifer region', and QEMU 7.0 or later. With --cache none, \
             Linux 5.10 suffices.",
        ),
    ],
    files: &[
        ("/var/lib/aquifer/vms/NAME.toml", "the definition of a VM"),
        ("/run/aquifer/vms/NAME/qmp", "a QMP monitor for other programs"),
        ("/run/aquifer/vms/NAME/serial", "the guest's serial port, a socket"),
        ("/run/aquifer/vms/NAME/console.log", "the guest's output on the serial port"),
        ("/run/aquifer/vms/NAME/log", "the log of QEMU"),
    ],
    see_also: &["aquifer-region(1)", "aquifer-serve-export(1)", "qemu-system-x86_64(1)"],
    ..Manual::NONE
};

/// The answer of `aquifer vm show`.
#[derive(Debug, Serialize)]
struct Shown {
    #[serde(flatten)]
    status: VmStatus,
    times: Spreads,
    #[serde(skip_serializing_if = "Option::is_none")]
    defined: Option<Defined>,
}

/// The answer of a command that changes a VM.
#[derive(Debug, Serialize)]
struct Done {
    vm: RegionName,
    done: &'static str,
}

impl Vm {
    /// Runs the subcommand.
    ///
    /// # Errors
    /// If there is no such VM, if it cannot be started or does not stop, or if its supervisor
    /// refuses.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let place = self.dir.place(common)?;
        let run_dir = place.run_dir.clone();
        match self.what {
            What::Create(create) => create.run(&place)?,
            What::Start(start) => start.run(&place)?,
            What::List(List { all: with_ended }) => {
                let (vms, failure) = all(&run_dir, common.json)?;
                if failure.is_some() && vms.is_empty() {
                    return failure.map_or(Ok(ExitCode::SUCCESS), Err);
                }
                if with_ended {
                    let ended = ended::latest(&run_dir)?;
                    let mut off = Defined::all(&place)?;
                    off.retain(|defined| vms.iter().all(|vm| vm.name != defined.name));
                    let table = format!("{}\n\n{}", listed(&vms, &off), ended::listed(&ended));
                    output::answer(common.json, &ended::all(&vms, off, ended), |_| table)?;
                } else {
                    output::answer(common.json, &vms, |all| listed(all, &[]))?;
                }
                return failure.map_or(Ok(ExitCode::SUCCESS), Err);
            }
            What::Show(Which { name }) => {
                let files = Files::new(&run_dir, &name);
                let status = client::status(&files);
                let defined = Defined::find(&place, &name);
                if let (Err(VmError::Unknown(_)), Some(defined)) = (&status, &defined) {
                    output::answer(common.json, defined, Defined::text_of_absent)?;
                    return Ok(ExitCode::SUCCESS);
                }
                if let Err(VmError::Unknown(_)) = &status
                    && let Some(last) = ended::last(&run_dir, &name)?
                {
                    output::answer(common.json, &last, ended::text)?;
                    return Ok(ExitCode::FAILURE);
                }
                let status = status.or_fail(|| format!("querying VM '{name}'"))?;
                let times = client::times(&files).or_fail(|| format!("querying VM '{name}'"))?;
                let shown = Shown { status, times: Spreads::of(&times), defined };
                output::answer(common.json, &shown, |shown| {
                    let definition = shown.defined.as_ref().map_or(String::new(), Defined::text);
                    text(&files, &shown.status) + &definition + &shown.times.text()
                })?;
            }
            What::Resize(resize) => {
                let files = Files::new(&run_dir, resize.name());
                return resize.run(common, &files);
            }
            What::Set(set) => set.run(&place)?,
            What::Rm(rm) => rm.run(&place)?,
            What::ShowBudget(show) => show.run(common, &run_dir)?,
            What::SetBudget(set) => set.run(common, &run_dir)?,
            What::Adopt(adopt) => adopt.run(common, &run_dir)?,
            What::Forget(Which { name: vm }) => {
                let forgotten = client::release(&Files::new(&run_dir, &vm));
                forgotten.or_fail(|| format!("forgetting VM '{vm}'"))?;
                let done = Done { vm, done: "forgotten" };
                output::answer(common.json, &done, |is| format!("{} {}", is.vm, is.done))?;
            }
            What::Migrate(migrate) => migrate.run(common, &run_dir)?,
            What::Resume(Resume { name: vm, force }) => {
                let exe = std::env::current_exe().or_fail(|| "finding this program")?;
                let resumed = client::resume(&exe, &Files::new(&run_dir, &vm), force);
                let done = match resumed.or_fail(|| format!("resuming VM '{vm}'"))? {
                    Resumed::Runs => "running",
                    Resumed::Sends => "sending the rest of its memory",
                };
                output::answer(common.json, &Done { vm, done }, |is| {
                    format!("{} is {}", is.vm, is.done)
                })?;
            }
            What::Stop(stop) => stop.run(&place)?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Stop {
    fn run(self, place: &Place<'_>) -> Result<()> {
        let Self { name: vm, force, timeout } = self;
        let common = place.common;
        let what = format!("stopping VM '{vm}'");
        let files = place.files(&vm);
        let was_at_rest = files.is_at_rest();
        // First: the agent would start the VM again as it ends.
        if place.definitions.file(&vm).exists() {
            files.rest("aquifer vm stop").or_fail(|| what.clone())?;
            if matches!(client::status(&files), Err(VmError::Unknown(_))) {
                return output::answer(common.json, &Done { vm, done: "stopped" }, |is| {
                    format!("{} is off, and stays off", is.vm)
                });
            }
        }
        let progress = Progress::spinner(what.clone());
        if !common.json && !force {
            let timeout = humantime::format_duration(timeout);
            progress.note(&format!(
                "waiting for the guest of VM '{vm}' to power itself off, at most {timeout} \
                 (--timeout); --force ends it at once"
            ));
        }
        client::stop(&files, force, timeout).map_err(|error| {
            if !was_at_rest {
                // It runs on as before.
                let _ = files.end_rest();
            }
            let failure = Failure::new(what, &error);
            match error {
                VmError::StillRunning(_) => {
                    failure.help("give it more time with --timeout, or end it with --force")
                }
                _ => failure,
            }
        })?;
        output::answer(common.json, &Done { vm, done: "stopped" }, |is| {
            format!("{} {}", is.vm, is.done)
        })
    }
}

/// Returns all VMs that answer, and the last failure of one that does not. Reports the others.
fn all(run_dir: &Path, json: bool) -> Result<(Vec<VmStatus>, Option<Failure>)> {
    let (mut all, mut failure) = (Vec::new(), None);
    for (name, status) in client::statuses(run_dir).or_fail(|| "listing VMs")? {
        match status {
            Ok(status) => all.push(status),
            // The VM has ended since it was listed.
            Err(VmError::Unknown(_)) => {}
            Err(error) => {
                let failed = Err::<(), _>(error).or_fail(|| format!("querying VM '{name}'"));
                if let Some(earlier) = std::mem::replace(&mut failure, failed.err()) {
                    earlier.report(json);
                }
            }
        }
    }
    Ok((all, failure))
}

/// Returns whether the VM's memory is a region.
fn is_pooled(status: &VmStatus) -> bool {
    matches!(&status.origin, Origin::Started(spec) if spec.backing == Backing::Region)
}

fn state(status: &VmStatus) -> String {
    match &status.state {
        State::Qemu(state) => state.clone(),
        State::Ended(how) => format!("ended: {how}"),
    }
}

fn listed(all: &[VmStatus], off: &[Defined]) -> String {
    if all.is_empty() && off.is_empty() {
        return "no VMs: 'aquifer vm create' creates one".to_owned();
    }
    let row = |vm: &VmStatus| {
        let memory = vm.share.as_ref().map_or(Bytes::ZERO, Share::memory);
        let mut row = vec![vm.name.to_string(), state(vm), memory.to_string(), vm.host.to_string()];
        row.extend(region::cells(vm.region.as_ref().map(|region| region.usage)));
        row
    };
    table(
        ["NAME", "STATE", "MEMORY", "HERE", "CACHE", "RESIDENT", "REMOTE", "ZERO"],
        all.iter().map(row).chain(off.iter().map(Defined::row)),
    )
}

fn text(files: &Files, status: &VmStatus) -> String {
    let VmStatus { access, transit, .. } = status;
    let mut text = String::new();
    let mut line = |name: &str, value: String| _ = writeln!(text, "{name:<12}{value}");
    line("vm", format!("{}, {}", status.name, state(status)));
    if let Some(share) = &status.share {
        let most = match &status.origin {
            Origin::Started(spec) if spec.max_memory > spec.memory => {
                format!(" of {}", spec.max_memory)
            }
            _ => String::new(),
        };
        line("memory", format!("{}{most}; {} of it in RAM here", share.memory(), status.host));
    }
    if let Origin::Started(spec) = &status.origin {
        spec.disks.iter().for_each(|disk| line("disk", disk.display().to_string()));
        spec.cached_disks
            .iter()
            .for_each(|disk| line("disk", format!("{}, cached", disk.display())));
    }
    line("limits", limits::text(&status.limits));
    if let Origin::Adopted { qmp, agent } = &status.origin {
        line("adopted", format!("through {}", qmp.display()));
        agent.iter().for_each(|agent| line("agent", agent.display().to_string()));
    }
    if let Some(handed_over) = &transit.handed_over {
        line("moved", format!("to host {}, which owns it now", handed_over.to));
        if let Some(left) = &handed_over.left_at_source {
            line("left", format!("part of its memory, which host {} fetches", left.host));
        }
    }
    match &transit.incoming {
        Some(incoming) if incoming.prepared => {
            line("incoming", format!("from host {}, waiting for the hand-over", incoming.from))
        }
        Some(incoming) => line("incoming", format!("from host {}", incoming.from)),
        None => {}
    }
    if let Some(source) = &transit.awaiting_source {
        let left = status
            .region
            .as_ref()
            .map_or_else(String::new, |region| format!("{} ", region.usage.awaiting_source));
        line("awaited", format!("{left}of its memory, from host {}", source.host));
    }
    if let Some(pid) = status.pid {
        let on = status.node.map_or(String::new(), |node| format!(" on NUMA node {node}"));
        line("qemu", format!("process {pid}{on}"));
    }
    if let (Some(serial), Some(console)) = (&access.serial, &access.console) {
        line("serial", format!("{} (output: {})", serial.display(), console.display()));
        line("qmp", access.qmp.display().to_string());
    }
    line("log", access.log.display().to_string());
    match &status.region {
        Some(region) => text.push_str(&region::text(&files.region(), region)),
        None if is_pooled(status) => line("region", "no engine serves it".to_owned()),
        None => {}
    }
    text.trim_end().to_owned()
}
