//! `aquifer vm`.

mod migrate;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use aquifer_guest::process::client::{self, Resumed};
use aquifer_guest::process::{Files, State, Status};
use aquifer_guest::{Accelerator, VmSpec};
use aquifer_page::{Bytes, RegionName};
use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use super::Common;
use super::region::{self, Cached};
use crate::failure::{Failure, OrFail, Result};
use crate::manual::Manual;
use crate::output;
use crate::progress::Progress;

/// Virtual machines whose memory is in the pool, with local RAM as its cache
///
/// A VM's memory is a region of its name, made when it starts and taken away when it ends. QEMU is the distribution's. What the guest
/// frees it gives back by its balloon device, which also reports free pages.
#[derive(Debug, Args)]
pub struct Vm {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Start(Box<Start>),
    /// The VMs of this host
    List,
    /// How a VM is, and what of its memory is where
    Show(Which),
    Migrate(migrate::Migrate),
    Resume(Resume),
    Stop(Stop),
}

/// Starts a VM in the background
///
/// Returns when QEMU runs. The VM has a serial port, a balloon, the disks that are named, and nothing else: no network, no display. What
/// follows '--' goes to QEMU as it is.
#[derive(Debug, Args)]
pub struct Start {
    /// The VM's name, and that of its region
    name: RegionName,
    /// Its memory
    #[arg(long, value_name = "SIZE")]
    memory: Bytes,
    #[command(flatten)]
    cached: Cached,
    /// Its processors
    #[arg(long, value_name = "N", default_value_t = 1)]
    cpus: u32,
    /// A file or block device that is its disk, raw unless its name ends in .qcow2; can be given several times
    #[arg(long = "disk", value_name = "FILE")]
    disks: Vec<PathBuf>,
    /// A kernel to boot
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// What that kernel finds as its first file system
    #[arg(long, value_name = "FILE", requires = "kernel")]
    initrd: Option<PathBuf>,
    /// What that kernel is told
    #[arg(long, value_name = "LINE", requires = "kernel")]
    append: Option<String>,
    /// What runs its code
    #[arg(long, value_name = "WHAT", default_value = "auto")]
    accel: AcceleratorName,
    /// QEMU's machine type
    #[arg(long, value_name = "TYPE", default_value = "q35")]
    machine: String,
    /// QEMU itself
    #[arg(long, value_name = "PROGRAM", default_value = "qemu-system-x86_64")]
    qemu: PathBuf,
    /// More of QEMU's arguments
    #[arg(last = true, value_name = "ARGUMENT")]
    extra: Vec<String>,
}

/// What runs a guest's code, as commands take it.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum AcceleratorName {
    /// KVM where QEMU can use it, emulation elsewhere
    Auto,
    /// The processor, by /dev/kvm
    Kvm,
    /// Emulation
    Tcg,
}

impl AcceleratorName {
    /// What it comes to with this QEMU and machine type.
    pub(super) fn choose(self, qemu: &Path, machine: &str) -> Accelerator {
        match self {
            Self::Auto => Accelerator::find(qemu, machine),
            Self::Kvm => Accelerator::Kvm,
            Self::Tcg => Accelerator::Tcg,
        }
    }
}

// Its help is that of the command that takes it.
#[derive(Debug, Args)]
#[expect(missing_docs, reason = "a text here would take the place of the commands' own")]
pub struct Which {
    /// The VM
    name: RegionName,
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
        ("aquifer vm show db", "Whether it runs, what of its memory is where, and how long faults take"),
        ("aquifer region resize-cache db 1G", "Gives half of its RAM back, now"),
        ("socat - unix:/run/aquifer/vms/db/serial", "Its serial port"),
        ("aquifer vm migrate db --to c", "Has it run on host c, a peer of this one, in about a second"),
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
             (-overcommit mem-lock=on) and direct I/O: disks go through this host's page cache, whatever cache= says.",
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

/// What was done to which VM.
#[derive(Debug, Serialize)]
struct Done {
    vm: RegionName,
    done: &'static str,
}

fn run_dir(common: &Common) -> Result<PathBuf> {
    std::path::absolute(&common.run_dir).or_fail(|| "finding the VMs")
}

impl Vm {
    /// Runs it.
    ///
    /// # Errors
    /// Where there is no such VM, it cannot be started, or does not stop.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let run_dir = run_dir(common)?;
        match self.what {
            What::Start(start) => start.run(common, &run_dir)?,
            What::List => {
                let all = client::list(&run_dir).or_fail(|| "listing VMs")?;
                let all: Vec<_> = all.iter().filter_map(|files| client::status(files).ok()).collect();
                output::answer(common.json, &all, |all| listed(all))?;
            }
            What::Show(Which { name }) => {
                let files = Files::new(&run_dir, &name);
                let status = client::status(&files).or_fail(|| format!("asking for VM '{name}'"))?;
                output::answer(common.json, &status, |status| text(&files, status))?;
            }
            What::Migrate(migrate) => migrate.run(common, &run_dir)?,
            What::Resume(Resume { name: vm, force }) => {
                let exe = std::env::current_exe().or_fail(|| "finding this program")?;
                let resumed = client::resume(&exe, &Files::new(&run_dir, &vm), force);
                let done = match resumed.or_fail(|| format!("having VM '{vm}' go on"))? {
                    Resumed::Runs => "running",
                    Resumed::Sends => "sending what was left here of it",
                };
                output::answer(common.json, &Done { vm, done }, |is| format!("{} is {}", is.vm, is.done))?;
            }
            What::Stop(stop) => stop.run(common, &run_dir)?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Start {
    fn run(self, common: &Common, run_dir: &Path) -> Result<()> {
        let Self { name, memory, cached, .. } = self;
        let what = || format!("starting VM '{name}'");
        let _progress = Progress::spinner(what());
        let absolute = |path: PathBuf| std::path::absolute(path).or_fail(what);
        let memory_spec = cached.spec(name.clone(), memory)?;
        let spec = VmSpec {
            name: name.clone(),
            memory,
            cpus: self.cpus,
            accelerator: self.accel.choose(&self.qemu, &self.machine),
            machine: self.machine,
            disks: self.disks.into_iter().map(absolute).collect::<Result<_>>()?,
            kernel: self.kernel.map(absolute).transpose()?,
            initrd: self.initrd.map(absolute).transpose()?,
            append: self.append,
            qemu: self.qemu,
            shim: region::shim()?,
            extra: self.extra,
        };
        let exe = std::env::current_exe().or_fail(what)?;
        let status = client::start(&exe, run_dir, &spec, &memory_spec).or_fail(what)?;
        output::answer(common.json, &status, |status| text(&Files::new(run_dir, &name), status))
    }
}

impl Stop {
    fn run(self, common: &Common, run_dir: &Path) -> Result<()> {
        let Self { name: vm, force, timeout } = self;
        let what = format!("stopping VM '{vm}'");
        let _progress = Progress::spinner(what.clone());
        client::stop(&Files::new(run_dir, &vm), force, timeout).map_err(|error| {
            let failure = Failure::new(what, &error);
            match error {
                aquifer_guest::GuestError::StillRunning(_) => {
                    failure.help("give it more time by --timeout, or --force it to end at once")
                }
                _ => failure,
            }
        })?;
        output::answer(common.json, &Done { vm, done: "stopped" }, |is| format!("{} {}", is.vm, is.done))
    }
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
    table.set_header(["NAME", "STATE", "MEMORY", "CACHE", "RESIDENT", "REMOTE", "ZERO"]);
    for vm in all {
        let mut row = vec![vm.spec.name.to_string(), state(vm), vm.spec.memory.to_string()];
        row.extend(region::cells(vm.region.as_ref().map(|region| region.usage)));
        table.add_row(row);
    }
    table.to_string()
}

fn text(files: &Files, status: &Status) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| _ = writeln!(text, "{name:<12}{value}");
    line("vm", format!("{}, {}", status.spec.name, state(status)));
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
        let left =
            status.region.as_ref().map_or_else(String::new, |region| format!("{} ", region.usage.coming));
        line("coming", format!("{left}of its memory, from host {}", coming.host));
    }
    if let Some(pid) = status.pid {
        line("qemu", format!("process {pid}"));
    }
    line("serial", format!("{} (said so far: {})", status.serial.display(), status.console.display()));
    line("qmp", status.qmp.display().to_string());
    line("log", status.log.display().to_string());
    match &status.region {
        Some(region) => text.push_str(&region::text(&files.region(), region)),
        None => line("region", "nothing serves it".to_owned()),
    }
    text.trim_end().to_owned()
}
