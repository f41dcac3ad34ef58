//! `aquifer vm`.

mod adopt;
mod balance;
mod budget;
mod ended;
mod limits;
mod manuals;
mod migrate;
mod resize;
mod start;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use aquifer_vm::memory::Share;
use aquifer_vm::process::client::{self, Resumed};
use aquifer_vm::process::{Files, Origin, State, Status};
use aquifer_vm::{Backing, GuestError};
use aquifer_page::{Bytes, RegionName};
use clap::{Args, Subcommand};
use serde::Serialize;

pub(super) use manuals::MANUALS;
use resize::Spreads;
pub(super) use start::AcceleratorName;

use super::Common;
use super::region;
use crate::failure::{Failure, OrFail, Result};
use crate::manual::Manual;
use crate::output;
use crate::progress::Progress;

/// Virtual machines whose memory grows and shrinks while they run, and is in the pool if you like
///
/// A VM's memory is in RAM of this host; or, with --lender, a region of its name, made when it starts and taken away when it ends. QEMU is the
/// distribution's. What the guest frees it gives back by its balloon device, which also reports free pages.
#[derive(Debug, Args)]
pub struct Vm {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Start(Box<start::Start>),
    /// The VMs of this host
    List(List),
    /// How a VM is, and what of its memory is where
    Show(Which),
    Resize(resize::Resize),
    Set(limits::Set),
    Budget(budget::Budget),
    Balance(balance::Balance),
    Adopt(adopt::Adopt),
    /// Has a VM that was adopted be its owner's alone; it runs on as it is
    Release(Which),
    Migrate(migrate::Migrate),
    Resume(Resume),
    Stop(Stop),
}

// The help is that of the command that takes this struct.
#[derive(Debug, Args)]
#[expect(missing_docs, reason = "a text here would take the place of the commands' own")]
pub struct Which {
    /// The VM
    name: RegionName,
}

// The help is that of the command that takes this struct.
#[derive(Debug, Args)]
#[expect(missing_docs, reason = "a text here would take the place of the command's own")]
pub struct List {
    /// Also those that have ended, with when and why: the last hundred
    #[arg(long)]
    all: bool,
}

/// Has a VM go on that stands still
///
/// Because it is paused, or because its move to another host was cut off. One whose keeper, a process of Aquifer's, was killed gets another.
#[derive(Debug, Args)]
pub struct Resume {
    /// The VM
    name: RegionName,
    /// Also where the VM may be another host's: only if it is certain that it does not run there, and never will
    #[arg(long)]
    force: bool,
}

/// Has a VM power itself off, and takes away what it has left
///
/// Also clears away one whose QEMU has ended by itself.
#[derive(Debug, Args)]
pub struct Stop {
    /// The VM
    name: RegionName,
    /// Ends it at once, as if its plug were pulled
    #[arg(long)]
    force: bool,
    /// How long the guest may take to power itself off
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = humantime::parse_duration)]
    timeout: Duration,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        (
            "aquifer vm start db --memory 8G --cache 2G --lender nbds://b.example.org/ --tls /etc/aquifer/tls --disk db.qcow2 \
             -- -nic user,model=virtio",
            "A VM of 8 GiB, of which 2 GiB at most are local RAM, with a network card of QEMU's own",
        ),
        (
            "aquifer vm show db",
            "Whether it runs, what of its memory is where, and how long faults take",
        ),
        ("aquifer region resize-cache db 1G", "Gives half of its RAM back, now"),
        ("socat - unix:/run/aquifer/vms/db/serial", "Its serial port"),
        (
            "aquifer vm migrate db --to c",
            "Has it run on host c, a peer of this one, in about a second",
        ),
        ("aquifer vm stop db", "Has it power itself off"),
    ],
    notes: &[
        (
            "What is kept",
            "The VM runs on in the background until it powers itself off or is stopped; then its region is gone, and what it took of its \
             lenders. An engine that dies is followed by another. A lender that cannot be reached has the guest's \
             processors wait that touch its pages.",
        ),
        (
            "Moving to another host",
            "Both hosts run agents that are peers, and that of the other one has 'accept = true' under [vms]. Both reach the VM's lenders and, at the same \
             paths, its disks. Its memory stays where it is, in the pool: what goes over is what is dirty in its local cache, and the state of its \
             devices. Until it runs there, ctrl-C leaves it here, untouched; so does whatever goes wrong. At one moment, when all is there, it is noted here \
             that it is the other host's: should the two lose each other just then, it stands still there until they meet again, or an operator decides \
             ('vm resume --force').",
        ),
        (
            "What cannot be",
            "Devices of the host that write to the guest's memory by themselves (vfio, vhost-user, vhost-vdpa), locked memory \
             (-overcommit mem-lock=on) and direct I/O: disks go through this host's page cache, whatever cache= says, or through that of the VM's group \
             ('group cache', --cached-disk). A VM with such disks cannot move to another host.",
        ),
        ("Needs", "What 'aquifer region' needs, and QEMU 7.0 or later."),
    ],
    files: &[
        ("/run/aquifer/vms/NAME/qmp", "a monitor (QMP) for whoever wants one"),
        ("/run/aquifer/vms/NAME/serial", "the guest's serial port, a socket"),
        ("/run/aquifer/vms/NAME/console.log", "what the guest has said there"),
        ("/run/aquifer/vms/NAME/log", "what QEMU has to say"),
    ],
    see_also: &["aquifer-region(1)", "aquifer-export(1)", "qemu-system-x86_64(1)"],
    ..Manual::NONE
};

/// The answer of `aquifer vm show`.
#[derive(Debug, Serialize)]
struct Shown {
    #[serde(flatten)]
    status: Status,
    times: Spreads,
}

/// The answer of a command that changes a VM.
#[derive(Debug, Serialize)]
struct Done {
    vm: RegionName,
    done: &'static str,
}

fn run_dir(common: &Common) -> Result<PathBuf> {
    std::path::absolute(&common.run_dir).or_fail(|| "finding the VMs")
}

impl Vm {
    /// Runs the subcommand.
    ///
    /// # Errors
    /// If there is no such VM, if it cannot be started or does not stop, or if its supervisor
    /// refuses.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let run_dir = run_dir(common)?;
        match self.what {
            What::Start(start) => start.run(common, &run_dir)?,
            What::List(List { all: with_ended }) => {
                let (vms, failure) = all(&run_dir)?;
                if failure.is_some() && vms.is_empty() {
                    return failure.map_or(Ok(ExitCode::SUCCESS), Err);
                }
                if with_ended {
                    let all = ended::All { vms, ended: ended::latest(&run_dir)? };
                    output::answer(common.json, &all, |all| {
                        format!("{}\n\n{}", listed(&all.vms), ended::listed(&all.ended))
                    })?;
                } else {
                    output::answer(common.json, &vms, |all| listed(all))?;
                }
                return failure.map_or(Ok(ExitCode::SUCCESS), Err);
            }
            What::Show(Which { name }) => {
                let files = Files::new(&run_dir, &name);
                let status = client::status(&files);
                if let Err(GuestError::Unknown(_)) = &status
                    && let Some(last) = ended::last(&run_dir, &name)?
                {
                    output::answer(common.json, &last, ended::text)?;
                    return Ok(ExitCode::FAILURE);
                }
                let status = status.or_fail(|| format!("asking for VM '{name}'"))?;
                let times = client::times(&files).or_fail(|| format!("asking for VM '{name}'"))?;
                let shown = Shown { status, times: Spreads::of(&times) };
                output::answer(common.json, &shown, |shown| {
                    text(&files, &shown.status) + &shown.times.text()
                })?;
            }
            What::Resize(resize) => {
                let files = Files::new(&run_dir, resize.name());
                return resize.run(common, &files);
            }
            What::Set(set) => {
                let files = Files::new(&run_dir, set.name());
                set.run(common, &files)?;
            }
            What::Budget(budget) => budget.run(common, &run_dir)?,
            What::Balance(balance) => balance.run(common, &run_dir)?,
            What::Adopt(adopt) => adopt.run(common, &run_dir)?,
            What::Release(Which { name: vm }) => {
                let released = client::release(&Files::new(&run_dir, &vm));
                released.or_fail(|| format!("releasing VM '{vm}'"))?;
                let done = Done { vm, done: "released" };
                output::answer(common.json, &done, |is| format!("{} {}", is.vm, is.done))?;
            }
            What::Migrate(migrate) => migrate.run(common, &run_dir)?,
            What::Resume(Resume { name: vm, force }) => {
                let exe = std::env::current_exe().or_fail(|| "finding this program")?;
                let resumed = client::resume(&exe, &Files::new(&run_dir, &vm), force);
                let done = match resumed.or_fail(|| format!("having VM '{vm}' go on"))? {
                    Resumed::Runs => "running",
                    Resumed::Sends => "sending what was left here of it",
                };
                output::answer(common.json, &Done { vm, done }, |is| {
                    format!("{} is {}", is.vm, is.done)
                })?;
            }
            What::Stop(stop) => stop.run(common, &run_dir)?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Stop {
    fn run(self, common: &Common, run_dir: &Path) -> Result<()> {
        let Self { name: vm, force, timeout } = self;
        let what = format!("stopping VM '{vm}'");
        let progress = Progress::spinner(what.clone());
        if !common.json && !force {
            let timeout = humantime::format_duration(timeout);
            progress.note(&format!(
                "waiting for the guest of VM '{vm}' to power itself off, at most {timeout} (--timeout); --force ends it at once"
            ));
        }
        client::stop(&Files::new(run_dir, &vm), force, timeout).map_err(|error| {
            let failure = Failure::new(what, &error);
            match error {
                GuestError::StillRunning(_) => {
                    failure.help("give it more time by --timeout, or --force it to end at once")
                }
                _ => failure,
            }
        })?;
        output::answer(common.json, &Done { vm, done: "stopped" }, |is| {
            format!("{} {}", is.vm, is.done)
        })
    }
}

/// Returns all VMs that answer, and the failure of one that does not.
fn all(run_dir: &Path) -> Result<(Vec<Status>, Option<Failure>)> {
    let (mut all, mut failure) = (Vec::new(), None);
    for (name, status) in client::statuses(run_dir).or_fail(|| "listing VMs")? {
        match status {
            Ok(status) => all.push(status),
            // The VM has ended since it was listed.
            Err(GuestError::Unknown(_)) => {}
            Err(error) => {
                failure = Err::<(), _>(error).or_fail(|| format!("asking for VM '{name}'")).err();
            }
        }
    }
    Ok((all, failure))
}

/// Returns whether the VM's memory is in the pool.
fn is_pooled(status: &Status) -> bool {
    matches!(&status.origin, Origin::Started(spec) if spec.backing == Backing::Region)
}

fn state(status: &Status) -> String {
    match &status.state {
        State::Qemu(state) => state.clone(),
        State::Ended(how) => format!("ended: {how}"),
    }
}

fn listed(all: &[Status]) -> String {
    if all.is_empty() {
        return "no VMs: 'aquifer vm start' starts one".to_owned();
    }
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["NAME", "STATE", "MEMORY", "HERE", "CACHE", "RESIDENT", "REMOTE", "ZERO"]);
    for vm in all {
        let memory = vm.share.as_ref().map_or(Bytes::ZERO, Share::memory);
        let mut row = vec![vm.name.to_string(), state(vm), memory.to_string(), vm.host.to_string()];
        row.extend(region::cells(vm.region.as_ref().map(|region| region.usage)));
        table.add_row(row);
    }
    table.to_string()
}

fn text(files: &Files, status: &Status) -> String {
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
        line("adopted", format!("by {}", qmp.display()));
        agent.iter().for_each(|agent| line("agent", agent.display().to_string()));
    }
    if let Some(given) = &status.given {
        line("moved", format!("to host {}, whose it is now", given.to));
        if let Some(left) = &given.left {
            line("left", format!("some of its memory, which host {} asks for", left.host));
        }
    }
    match &status.awaited {
        Some(awaited) if awaited.prepared => {
            line("comes", format!("from host {}, and waits for its word", awaited.from))
        }
        Some(awaited) => line("comes", format!("from host {}", awaited.from)),
        None => {}
    }
    if let Some(coming) = &status.coming {
        let left = status
            .region
            .as_ref()
            .map_or_else(String::new, |region| format!("{} ", region.usage.coming));
        line("coming", format!("{left}of its memory, from host {}", coming.host));
    }
    if let Some(pid) = status.pid {
        line("qemu", format!("process {pid}"));
    }
    if let (Some(serial), Some(console)) = (&status.serial, &status.console) {
        line("serial", format!("{} (said so far: {})", serial.display(), console.display()));
        line("qmp", status.qmp.display().to_string());
    }
    line("log", status.log.display().to_string());
    match &status.region {
        Some(region) => text.push_str(&region::text(&files.region(), region)),
        None if is_pooled(status) => line("region", "nothing serves it".to_owned()),
        None => {}
    }
    text.trim_end().to_owned()
}
