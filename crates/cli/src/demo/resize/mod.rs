//! `aquifer demo resize`: a guest boots with 512 MiB, grows to 2 GiB in steps, uses it, and gives it back.
//!
//! Everything is real: QEMU, a stock kernel, the agent in the guest; with `--pool` a lender has the memory, and this host a part of it as cache.

mod guest;
mod report;

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aquifer_guest::initrd::Modules;
use aquifer_guest::memory::{Order, Resized, UNLIMITED};
use aquifer_guest::process::{Files, client};
use aquifer_guest::{Backing, Initrd, VmSpec};
use aquifer_page::{Bytes, RegionName};
use aquifer_region::process::RegionSpec;

use super::begun::{Begun, Outcome};
use super::machine::{MACHINE, Machine};
use super::process::{self, Process, lender_socket};
use super::remove;
use super::wait::Wait;
use crate::commands::region::shim;
use crate::failure::{Failure, OrFail, Result};
use crate::lender::{Lender, Trust};
use crate::progress::Progress;
pub use guest::run as be_a_guest;
pub use report::{Step, Summary};

/// What a demo is told.
#[derive(Debug)]
pub struct Options {
    /// Whether the guest's memory is in the pool.
    pub pool: bool,
    /// What the guest runs on.
    pub machine: Machine,
    /// Where marks, sockets and logs are kept while it runs.
    pub run_dir: PathBuf,
}

/// Marks of demos have this kind.
const KIND: &str = "resize-demo";

const VM: &str = "demo";

/// What the guest boots with, what it grows to, and by how much at a time: those of the paper (Resizing, section IV-C).
const BOOT: Bytes = Bytes::mib(512);
const MOST: Bytes = Bytes::mib(2048);
const STEP: Bytes = Bytes::mib(512);

/// What of its memory the guest's process leaves to the rest of the guest.
const REST: Bytes = Bytes::mib(320);

/// Local RAM where the memory is in the pool.
const CACHE: Bytes = Bytes::mib(512);

/// Modules of the guest's kernel: memory that comes and goes, the balloon that reports what is free, and the port of its agent.
const MODULES: [&str; 4] = ["virtio_pci", "virtio_mem", "virtio_balloon", "virtio_console"];

/// How long the guest may take to boot, or to fill and check its memory.
const PATIENCE: Duration = Duration::from_secs(180);

/// How long it may take until what is free in the guest is back with this host.
const REPORTING: Duration = Duration::from_secs(15);

/// How near to what it was the host's memory is to be.
const NEAR: f64 = 1.02;

/// Runs the demo from nothing to nothing.
///
/// # Errors
/// What this machine lacks, or which step failed.
pub fn run(options: &Options) -> Result<Outcome<Summary>> {
    let begun = Begun::begin(&options.run_dir, KIND, |dir, _| {
        clear(dir);
        Ok(())
    })?;
    let mut progress = Progress::spinner("a guest boots");
    let stage = Stage::set(begun.dir.clone(), options)?;
    let mut user = stage.boot(options, begun.wait())?;
    let summary = play(&stage, &mut user, options, &mut progress)?;
    let picture = summary.picture()?;
    Ok(Outcome { summary, picture })
}

fn play(stage: &Stage, user: &mut User<'_>, options: &Options, progress: &mut Progress) -> Result<Summary> {
    let less = |size: Bytes| size.saturating_sub(REST);
    let before = user.hold(less(BOOT))?;
    let host_bytes_before = stage.host()?;
    let up = (1..=(MOST - BOOT).0 / STEP.0).map(|step| Bytes(BOOT.0 + step * STEP.0));
    let down = (0..(MOST - BOOT).0 / STEP.0).rev().map(|step| Bytes(BOOT.0 + step * STEP.0));
    let (mut steps, mut now, mut last) = (Vec::new(), BOOT, before);
    for size in up.chain(down) {
        progress.say(format!("the guest's memory: {now} to {size}"));
        if size < now {
            // What it is to give up it must not use.
            last = user.hold(less(size))?;
        }
        let resized = stage.resize(size)?;
        now = resized.reached;
        last =
            if size > resized.from { user.hold(less(size).min(less(now)))? } else { user.hold(last.held)? };
        steps.push(Step::of(&resized, last.held, stage.host()?));
    }
    let near = |bytes: &Bytes| bytes.0 as f64 <= host_bytes_before.0 as f64 * NEAR;
    let back = user.wait.at_most(REPORTING, || Ok(Some(stage.host()?).filter(near)))?;
    let host_bytes_after = back.map_or_else(|| stage.host(), Ok)?;
    let guest_errors = last.wrong + last.errors.saturating_sub(before.errors);
    let memory = if options.pool { "pool" } else { "local" };
    Ok(Summary { memory, steps, guest_errors, host_bytes_before, host_bytes_after })
}

/// What the demo happens on. Dropping it takes everything away.
#[derive(Debug)]
struct Stage {
    dir: PathBuf,
    vm: Files,
    _lender: Option<Process>,
}

impl Stage {
    fn set(dir: PathBuf, options: &Options) -> Result<Self> {
        fs::create_dir_all(&dir).or_fail(|| format!("making {}", dir.display()))?;
        let name: RegionName = VM.parse().or_fail(|| "naming the guest")?;
        let vm = Files::new(&dir, &name);
        // From here on what is made is removed.
        let mut stage = Self { dir, vm, _lender: None };
        if options.pool {
            stage._lender = Some(process::lender(&stage.dir, MOST)?);
        }
        Ok(stage)
    }

    /// Makes the guest's first file system: this program, which is the guest's first process, the agent, and modules.
    fn initrd(&self, kernel: &Path) -> Result<PathBuf> {
        let what = || "making the guest's first file system";
        let exe = std::env::current_exe().or_fail(what)?;
        let agent = exe.with_file_name("aquifer-guest");
        let mut initrd = Initrd::default();
        initrd.copy(&exe, "/init").or_fail(what)?;
        initrd.copy(&agent, guest::AGENT).map_err(|error| {
            Failure::new(what(), error).help("the agent 'aquifer-guest' belongs beside this program")
        })?;
        let modules = Modules::of(kernel).ok_or_else(|| {
            let why = format!("there are no modules of {} in lib/modules beside it", kernel.display());
            Failure::new(what(), why).help(
                "name a kernel by --kernel that is called vmlinuz-RELEASE, or has its modules beside it",
            )
        })?;
        initrd.modules(&modules, MODULES).or_fail(what)?;
        let path = self.dir.join("initrd");
        fs::write(&path, initrd.finish()).or_fail(what)?;
        Ok(path)
    }

    fn boot<'a>(&self, options: &Options, wait: Wait<'a>) -> Result<User<'a>> {
        let what = || "starting the guest";
        let kernel = options.machine.kernel()?;
        let name = self.vm.name().clone();
        let spec = VmSpec {
            name: name.clone(),
            memory: BOOT,
            max_memory: MOST,
            backing: if options.pool { Backing::Region } else { Backing::Local { huge: None } },
            cpus: 2,
            accelerator: options.machine.accelerator,
            machine: MACHINE.to_owned(),
            disks: Vec::new(),
            cached_disks: Vec::new(),
            initrd: Some(self.initrd(&kernel)?),
            kernel: Some(kernel),
            // Memory that leaves need not be filled with zeroes first.
            append: Some(
                "console=ttyS0 quiet panic=-1 memhp_default_state=online_movable init_on_alloc=0 rdinit=/init -- guest-memory"
                    .to_owned(),
            ),
            qemu: options.machine.qemu.clone(),
            shim: shim()?,
            extra: Vec::new(),
        };
        let region = options.pool.then(|| self.region(name)).transpose()?;
        let exe = std::env::current_exe().or_fail(what)?;
        client::start(&exe, &self.dir, &spec, region.as_ref(), &UNLIMITED).or_fail(what)?;
        let port = wait.until(what(), PATIENCE, || Ok(UnixStream::connect(self.vm.serial()).ok()))?;
        // It says little, and is waited for elsewhere.
        port.set_nonblocking(true).or_fail(what)?;
        let mut user = User { port: BufReader::new(port), wait };
        // It says so when it listens.
        user.listen(Bytes::ZERO)?;
        Ok(user)
    }

    fn region(&self, name: RegionName) -> Result<RegionSpec> {
        let uri = format!("nbd+unix:///?socket={}", lender_socket(&self.dir).display());
        let uri = uri.parse().or_fail(|| "naming the lender")?;
        let lender = Lender::find(&uri, &Trust::default(), None)?;
        let (leases, identity) = (vec![lender.lease], lender.identity);
        Ok(RegionSpec { leases, identity, ..RegionSpec::new(name, MOST, CACHE) })
    }

    fn resize(&self, size: Bytes) -> Result<Resized> {
        let what = || format!("resizing the guest to {size}");
        let exe = std::env::current_exe().or_fail(what)?;
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

    /// RAM of this host that the guest's memory takes.
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

/// Removes what a demo left that was killed. Its lender went with it.
fn clear(dir: &Path) {
    for vm in client::list(dir).unwrap_or_default() {
        let _ = client::stop(&vm, true, Duration::ZERO);
    }
    remove(dir);
}

/// What the guest's process has said.
#[derive(Clone, Copy, Debug)]
struct Holds {
    held: Bytes,
    wrong: u64,
    errors: u64,
}

/// Tells the guest's process what to do, over the guest's serial port.
struct User<'a> {
    port: BufReader<UnixStream>,
    wait: Wait<'a>,
}

impl User<'_> {
    /// Has it hold so much, with every byte checked.
    fn hold(&mut self, size: Bytes) -> Result<Holds> {
        let what = || format!("having the guest use {size}");
        writeln!(self.port.get_mut(), "{}", size.0 >> 20).or_fail(what)?;
        self.listen(size)
    }

    /// Waits until it says that it holds so much.
    fn listen(&mut self, size: Bytes) -> Result<Holds> {
        let what = || format!("having the guest use {size}");
        let mut line = String::new();
        self.wait.until(&what(), PATIENCE, || {
            loop {
                match self.port.read_line(&mut line) {
                    Ok(0) => return Err(Failure::new(what(), "it has ended")),
                    Ok(_) => {
                        let holds = parse(&line).filter(|holds| holds.held.0 >> 20 == size.0 >> 20);
                        line.clear();
                        if holds.is_some() {
                            return Ok(holds);
                        }
                    }
                    // The rest of the line comes.
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(None),
                    Err(error) => return Err(Failure::new(what(), error)),
                }
            }
        })
    }
}

fn parse(line: &str) -> Option<Holds> {
    let (_, words) = line.trim().split_once(guest::HOLDS)?;
    let mut numbers = words.split_whitespace().map(str::parse::<u64>);
    let mut next = || numbers.next()?.ok();
    Some(Holds { held: Bytes::mib(next()?), wrong: next()?, errors: next()? })
}
