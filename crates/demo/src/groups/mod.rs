//! `aquifer demo groups`: two tenants with two guests each, all of the same image.
//!
//! Each group keeps equal pages of its guests once, and shares nothing with the other group. The
//! saved memory goes to the guest that needs it, as long as the group saves it.
//!
//! Everything is real: QEMU, a stock kernel, swap disks, and the services of a host (`aquifer
//! serve dedup` for each group, and `aquifer serve reprovision`).

mod mapped;
mod picture;
mod report;
mod stage;
mod watch;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use aquifer_cli::failure::{Failure, Result};
use aquifer_cli::progress::Progress;
use aquifer_group::balance::Balanced;
use aquifer_page::Bytes;

use super::machine::{Machine, clear};
use super::session::{DemoSession, Outcome};
use super::user::{Holds, Part, User};
use super::wait::Wait;
use report::{Group, Need, Summary};
use stage::{Stage, VMS};
use watch::Watch;

/// The options of the demo.
#[derive(Debug)]
pub struct Options {
    /// The kernel, accelerator and QEMU of the guests.
    pub machine: Machine,
    /// The directory of marks, sockets and logs while the demo runs.
    pub run_dir: PathBuf,
}

/// The kind in the demo's mark.
const KIND: &str = "groups-demo";

/// A guest's memory at boot. `BASE` of it is its own; it has the rest only while its group saves as
/// much.
const MEMORY: Bytes = Bytes::mib(384);
const BASE: Bytes = Bytes::mib(256);

/// The content that all guests have in common, and the content that each has for itself.
const IMAGE: Bytes = Bytes::mib(112);
const OWN: Bytes = Bytes::mib(16);

/// The private content to which one guest grows. It is more than the base leaves beside the image.
/// It is also more than the group would save on equal kernels alone, some 60 MiB.
const MUCH: Bytes = Bytes::mib(152);

/// The growth of that guest in one step.
const GROWS: Bytes = Bytes::mib(20);

/// The part of a guest's memory that holds the image: seed 1; a guest's private content has others.
const IMAGE_PART: Part = Part { number: 0, seed: 1 };

/// The guest that comes to need more, and the guest of its group that writes to their shared pages.
const NEEDY: usize = 0;
const WRITER: usize = 1;

/// How long a step of the host's services may take.
const TIMEOUT: Duration = Duration::from_secs(180);

/// The number of consecutive periods without swapping that end a step.
const QUIET: usize = 3;

/// Runs the demo and removes all that it made.
///
/// # Errors
/// If this machine lacks a requirement, or if a step fails.
pub fn run(options: &Options) -> Result<Outcome<Summary>> {
    let began = Instant::now();
    let session = DemoSession::begin(&options.run_dir, KIND, |dir, _| {
        clear(dir);
        Ok(())
    })?;
    let progress = Progress::spinner("two groups of two guests boot");
    let stage = Stage::set(session.dir.clone(), &options.machine)?;
    let users = stage.boot(session.wait())?;
    let mut play = Play { stage: &stage, users, wait: session.wait(), progress, across: 0 };
    let (mut summary, picture) = play.run()?;
    summary.seconds = began.elapsed().as_secs_f64();
    Ok(Outcome { summary, picture })
}

struct Play<'a> {
    stage: &'a Stage,
    users: Vec<User<'a>>,
    wait: Wait<'a>,
    progress: Progress,
    /// Pages of another group's frames that guests have mapped.
    across: u64,
}

impl Play<'_> {
    fn run(&mut self) -> Result<(Summary, Vec<u8>)> {
        self.progress.say("the guests use their memory".to_owned());
        self.all(|_| (IMAGE_PART, IMAGE))?;
        let before = self.all(|vm| (own(vm), OWN))?;

        self.progress.say("the scanners look for equal pages".to_owned());
        let mut watch = Watch::start(self.stage)?;
        self.until(&mut watch, "sharing equal pages", |group| {
            group.sharing.saved_bytes >= IMAGE && group.vms.iter().all(|vm| vm.size <= BASE)
        })?;
        watch.mark("one needs more");
        let mut need = self.need(&mut watch)?;
        let groups = self.look(&watch)?;

        self.progress.say(format!("{} writes to its shared pages", VMS[WRITER].name));
        watch.mark("another writes");
        self.users[NEEDY].hold(own(NEEDY), OWN)?;
        self.users[WRITER].hold(own_image(WRITER), IMAGE)?;
        self.until(&mut watch, "taking back memory that is no longer saved", |group| {
            let handed: Bytes = group.vms.iter().map(|vm| vm.size.saturating_sub(vm.base)).sum();
            group.plan.deficit == Bytes::ZERO && handed <= group.sharing.saved_bytes
        })?;
        let left = self.look(&watch)?;
        need.left_bytes = left[0].balloon_bytes[NEEDY];

        self.progress.say("everything is checked".to_owned());
        let after = self.all(|vm| (own(vm), OWN))?;
        let errors = before
            .iter()
            .zip(&after)
            .map(|(before, after)| after.wrong + after.errors.saturating_sub(before.errors));
        let picture = picture::draw(&watch)?;
        let summary = Summary {
            memory_bytes: MEMORY,
            base_bytes: BASE,
            image_bytes: IMAGE,
            groups,
            groups_after: left,
            need,
            cross_group_merges: self.across,
            guest_errors: errors.sum(),
            seconds: 0.0,
        };
        Ok((summary, picture))
    }

    /// Tells all guests to hold a part each, then waits for all of them.
    fn all(&mut self, what: impl Fn(usize) -> (Part, Bytes)) -> Result<Vec<Holds>> {
        for (vm, user) in self.users.iter_mut().enumerate() {
            let (part, size) = what(vm);
            user.tell(part, size)?;
        }
        let listen = |(vm, user): (usize, &mut User<'_>)| {
            let (part, size) = what(vm);
            user.listen(part, size)
        };
        self.users.iter_mut().enumerate().map(listen).collect()
    }

    /// Waits until `is` holds for both groups, in a period that began after the call.
    fn until(&self, watch: &mut Watch, what: &str, is: impl Fn(&Balanced) -> bool) -> Result<()> {
        let since = watch.turns();
        self.wait.until(what, TIMEOUT, || {
            watch.check()?;
            let turn = watch.last().filter(|_| watch.turns() > since + 1);
            Ok(turn.filter(|turn| turn.groups.len() == 2 && turn.groups.iter().all(&is)).map(drop))
        })
    }

    /// Lets one guest use more than its base, until the guest has enough memory and stops swapping.
    ///
    /// It grows by no more at a time than the balancer gives in two periods. A guest that grows at
    /// once may swap out shared pages faster than the balancer gives. Its group then saves less,
    /// and the guest stays short.
    fn need(&mut self, watch: &mut Watch) -> Result<Need> {
        let vm = &VMS[NEEDY];
        self.progress.say(format!("{} needs more than its base", vm.name));
        let (began, first) = (Instant::now(), watch.turns());
        let mut holds = OWN;
        while holds < MUCH {
            holds = MUCH.min(holds + GROWS);
            let periods = if holds == MUCH { QUIET } else { 1 };
            self.until_calm(watch, holds, periods)?;
        }
        let swapped = watch.swapped(vm.name, first);
        Ok(Need {
            vm: vm.name.to_owned(),
            holds_bytes: IMAGE + MUCH,
            base_bytes: BASE,
            got_bytes: watch.size(vm.name).unwrap_or_default(),
            left_bytes: Bytes::ZERO,
            swapped_bytes_per_s: swapped.iter().copied().max().unwrap_or_default(),
            swapped_bytes_per_s_after: swapped.last().copied().unwrap_or_default(),
            seconds: began.elapsed().as_secs_f64(),
        })
    }

    /// Holds so much until the last `periods` periods saw no swapping.
    fn until_calm(&mut self, watch: &mut Watch, holds: Bytes, periods: usize) -> Result<()> {
        let vm = &VMS[NEEDY];
        let (deadline, since) = (Instant::now() + TIMEOUT, watch.turns());
        loop {
            self.users[NEEDY].hold(own(NEEDY), holds)?;
            watch.check()?;
            // The period under way may have begun before the guest held that.
            let swapped = watch.swapped(vm.name, since + 1);
            let calm = swapped.iter().rev().take_while(|swapped| **swapped == Bytes::ZERO).count();
            if calm >= periods {
                return Ok(());
            }
            if Instant::now() > deadline {
                let why =
                    format!("it still swaps with {}", watch.size(vm.name).unwrap_or_default());
                let what = format!("giving guest '{}' the memory it needs", vm.name);
                return Err(Failure::new(what, why));
            }
        }
    }

    /// Returns the state of both groups.
    fn look(&mut self, watch: &Watch) -> Result<Vec<Group>> {
        let mapped = mapped::look(self.stage)?;
        self.across += mapped.iter().map(|mapped| mapped.others).sum::<u64>();
        watch.groups(&mapped)
    }
}

/// Returns the part of a guest's private content. `own_image` replaces the shared image.
fn own(vm: usize) -> Part {
    Part { number: 1, seed: vm as u64 + 2 }
}

fn own_image(vm: usize) -> Part {
    Part { number: 0, seed: vm as u64 + 2 + VMS.len() as u64 }
}
