//! `aquifer demo resize`: a guest boots with 512 MiB, grows to 2 GiB in steps, uses it, and shrinks
//! again.
//!
//! Everything is real: QEMU, a stock kernel, the agent in the guest. With `--pool` a lender has the
//! memory, and this host caches a part of it.

mod report;

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use aquifer_cli::failure::{OrFail, Result};
use aquifer_cli::lender::{ClaimedLender, Purpose, Trust};
use aquifer_cli::progress::Progress;
use aquifer_hosts::Export;
use aquifer_page::{Bytes, RegionName};
use aquifer_region::process::RegionSpec;
use aquifer_vm::memory::{Order, Resized, UNLIMITED};
use aquifer_vm::process::client::NewVm;
use aquifer_vm::process::{Files, client};
use aquifer_vm::{Backing, VmSpec};

use super::machine::{Machine, clear};
use super::process::{self, lender_socket};
use super::remove;
use super::session::{DemoSession, Outcome};
use super::user::{Part, User};
use super::wait::Wait;
use crate::program;
pub use report::{Step, Summary};

/// The options of the demo.
#[derive(Debug)]
pub struct Options {
    /// Whether the guest's memory is in the pool.
    pub pool: bool,
    /// The kernel, accelerator and QEMU of the guest.
    pub machine: Machine,
    /// The directory of marks, sockets and logs while the demo runs.
    pub run_dir: PathBuf,
}

/// The kind in the demo's mark.
const KIND: &str = "resize-demo";

const VM: &str = "demo";

/// The guest's memory at boot, its largest memory, and the step, as in \[Bielski18\], section IV-C.
const BOOT: Bytes = Bytes::mib(512);
const MOST: Bytes = Bytes::mib(2048);
const STEP: Bytes = Bytes::mib(512);

/// Memory that the guest's process leaves to the rest of the guest.
const REST: Bytes = Bytes::mib(320);

/// The only part that the guest's process holds.
const PART: Part = Part { number: 0, seed: 0 };

/// The local cache of memory in the pool.
const CACHE: Bytes = Bytes::mib(512);

/// Modules of the guest's kernel: virtio-mem, the balloon that reports free pages, and the port of
/// its agent.
const MODULES: [&str; 4] = ["virtio_pci", "virtio_mem", "virtio_balloon", "virtio_console"];

/// How long the guest's free memory may take to be back with this host.
const REPORTING: Duration = Duration::from_secs(15);

/// The largest ratio of the host's RAM use after the demo to that before it.
const NEAR: f64 = 1.02;

/// Runs the demo and removes all that it made.
///
/// # Errors
/// If this machine lacks a requirement, or if a step fails.
pub fn run(options: &Options) -> Result<Outcome<Summary>> {
    let session = DemoSession::begin(&options.run_dir, KIND, |dir, _| {
        clear(dir);
        Ok(())
    })?;
    let mut progress = Progress::spinner("a guest boots");
    let stage = Stage::set(session.dir.clone(), options)?;
    let mut user = stage.boot(options, session.wait())?;
    let summary = play(&stage, &mut user, options, &mut progress)?;
    let picture = summary.picture()?;
    Ok(Outcome { summary, picture })
}

fn play(
    stage: &Stage,
    user: &mut User<'_>,
    options: &Options,
    progress: &mut Progress,
) -> Result<Summary> {
    let less = |size: Bytes| size.saturating_sub(REST);
    let before = user.hold(PART, less(BOOT))?;
    let host_bytes_before = stage.host()?;
    let up = (1..=(MOST - BOOT).0 / STEP.0).map(|step| Bytes(BOOT.0 + step * STEP.0));
    let down = (0..(MOST - BOOT).0 / STEP.0).rev().map(|step| Bytes(BOOT.0 + step * STEP.0));
    let (mut steps, mut now, mut last) = (Vec::new(), BOOT, before);
    for size in up.chain(down) {
        progress.say(format!("the guest's memory: {now} to {size}"));
        if size < now {
            // The guest can give up only memory that it does not use.
            last = user.hold(PART, less(size))?;
        }
        let resized = stage.resize(size)?;
        now = resized.reached;
        last = if size > resized.from {
            user.hold(PART, less(size).min(less(now)))?
        } else {
            user.hold(PART, last.held)?
        };
        steps.push(Step::of(&resized, last.held, stage.host()?));
    }
    let near = |bytes: &Bytes| bytes.0 as f64 <= host_bytes_before.0 as f64 * NEAR;
    let back = user.wait.at_most(REPORTING, || Ok(Some(stage.host()?).filter(near)))?;
    let host_bytes_after = back.map_or_else(|| stage.host(), Ok)?;
    let guest_errors = last.wrong + last.errors.saturating_sub(before.errors);
    let memory = if options.pool { "pool" } else { "local" };
    Ok(Summary { memory, steps, guest_errors, host_bytes_before, host_bytes_after })
}

/// The guest with its files and lender; its drop removes all of it.
#[derive(Debug)]
struct Stage {
    dir: PathBuf,
    vm: Files,
    _lender: Option<Export>,
}

impl Stage {
    fn set(dir: PathBuf, options: &Options) -> Result<Self> {
        fs::create_dir_all(&dir).or_fail(|| format!("making {}", dir.display()))?;
        let name: RegionName = VM.parse().or_fail(|| "naming the guest")?;
        let vm = Files::new(&dir, &name);
        // If a step fails, the drop of `stage` removes the files.
        let mut stage = Self { dir, vm, _lender: None };
        if options.pool {
            stage._lender = Some(process::lender(&stage.dir, MOST)?);
        }
        Ok(stage)
    }

    fn boot<'a>(&self, options: &Options, wait: Wait<'a>) -> Result<User<'a>> {
        let what = || "starting the guest";
        let name = self.vm.name().clone();
        let spec = VmSpec {
            max_memory: MOST,
            backing: if options.pool { Backing::Region } else { Backing::Local { huge: None } },
            ..options.machine.guest(&self.dir, name.clone(), BOOT, &MODULES)?
        };
        let region = options.pool.then(|| self.region(name)).transpose()?;
        let exe = program::aquifer()?;
        let (memory, limits) = (region.as_ref(), &UNLIMITED);
        let vm = NewVm { spec: &spec, memory, limits, definition: None };
        client::start(&exe, &self.dir, vm).or_fail(what)?;
        let mut user = User::meet(&self.vm.serial(), wait)?;
        user.is_there()?;
        Ok(user)
    }

    fn region(&self, name: RegionName) -> Result<RegionSpec> {
        let uri = format!("nbd+unix:///?socket={}", lender_socket(&self.dir).display());
        let uri = uri.parse().or_fail(|| "naming the lender")?;
        let lender = ClaimedLender::find(&uri, &Trust::default(), None, Purpose::Volume("demo"))?;
        let (leases, identity) = (vec![lender.lease], lender.identity);
        Ok(RegionSpec { leases, identity, ..RegionSpec::new(name, MOST, CACHE) })
    }

    fn resize(&self, size: Bytes) -> Result<Resized> {
        let what = || format!("resizing the guest to {size}");
        let exe = program::aquifer()?;
        let order = Order {
            size,
            from: None,
            exact: false,
            retry: Duration::from_secs(10),
            urgent: false,
            stages: true,
        };
        client::resize(&exe, &self.vm, &order, |_| ()).or_fail(what)
    }

    /// Returns the RAM of this host that the guest's memory takes.
    fn host(&self) -> Result<Bytes> {
        Ok(client::status(&self.vm).or_fail(|| "asking for the guest")?.host)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // The lender goes last.
        let _ = client::stop(&self.vm, true, Duration::ZERO);
        self._lender = None;
        remove(&self.dir);
    }
}
