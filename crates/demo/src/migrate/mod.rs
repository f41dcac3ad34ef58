//! `aquifer demo migrate`: a busy guest moves from one host to another and back.
//!
//! Beside it, QEMU by itself moves the same guest. A user asks the guest over its serial port and
//! measures how long the guest stays silent.
//!
//! Everything is real: two hosts' agents in network namespaces of their own, an exporting process
//! that lends, QEMU, a stock kernel.

mod guest;
mod peer;
mod report;
mod serial;
mod stage;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use aquifer_cli::failure::Result;
use aquifer_cli::progress::Progress;
use aquifer_page::Bytes;
use aquifer_vm::migrate::MigrationReport;
use serde_json::Value;

use super::machine::{MACHINE, Machine};
use super::process::lender_socket;
use super::session::{DemoSession, Outcome};
use super::wait::Wait;
pub use guest::run as be_a_guest;
use peer::Qemu;
pub use report::{Move, Summary};
use serial::{Answer, User};
use stage::{Boot, Stage, ask};

/// The options of the demo.
#[derive(Debug)]
pub struct Options {
    /// Percent of the guest's used memory that is in local RAM.
    pub local: u64,
    /// The kernel, accelerator and QEMU of the guest.
    pub machine: Machine,
    /// The directory of marks, sockets and logs while the demo runs.
    pub run_dir: PathBuf,
}

/// The kind in the demo's mark.
const KIND: &str = "migrate-demo";

const VM: &str = "demo";

/// The guest's memory, and its load as `aquifer-demo guest-load` takes it: 200 MiB, nine of ten
/// writes to a fifth of them, 20 MiB/s.
const MEMORY: Bytes = Bytes::mib(512);
const LOAD: &str = "guest-load 200 20 20";

/// How many reports, ten a second, the guest gives before and after a move.
const BUSY: u64 = 40;

/// How long a guest may take to boot and to be busy.
const BOOTING: Duration = Duration::from_secs(180);

/// How long the demo waits for a silent guest that QEMU has moved by itself.
const DEAF: Duration = Duration::from_secs(20);

/// How long after a move silence still counts.
const AFTER: Duration = Duration::from_secs(1);

/// Runs the demo and removes all that it made.
///
/// # Errors
/// If this machine lacks a requirement, or if a step fails.
pub fn run(options: &Options) -> Result<Outcome<Summary>> {
    let session = DemoSession::begin(&options.run_dir, KIND, stage::clean_up)?;
    let kernel = options.machine.kernel()?;
    let wait = session.wait();
    let mut progress = Progress::spinner("two hosts and a lender");
    let stage =
        Stage::set(session.dir.clone(), &session.instance, MEMORY, &options.machine.qemu, wait)?;
    let boot = Boot {
        qemu: options.machine.qemu.clone(),
        memory: MEMORY,
        kernel,
        initrd: stage.initrd()?,
        append: format!("console=ttyS0 quiet panic=-1 clearcpuid=cx16 rdinit=/init -- {LOAD}"),
        accelerator: options.machine.accelerator,
    };
    let play = Play { stage: &stage, boot: &boot, wait, progress: &mut progress };
    let summary = play.run(options)?;
    let picture = summary.picture()?;
    Ok(Outcome { summary, picture })
}

struct Play<'a> {
    stage: &'a Stage,
    boot: &'a Boot,
    wait: Wait<'a>,
    progress: &'a mut Progress,
}

impl Play<'_> {
    fn run(mut self, options: &Options) -> Result<Summary> {
        let (qemu, footprint, qemu_guest_errors) = self.by_itself()?;
        let cache_bytes =
            Bytes((footprint * options.local / 100).next_multiple_of(Bytes::mib(1).0));
        let ([there, back], guest_errors) = self.by_aquifer(cache_bytes)?;
        let summary = Summary {
            guest_bytes: MEMORY,
            footprint_bytes: Bytes(footprint),
            cache_bytes,
            qemu,
            there,
            back,
            speedup: 0.0,
            data_ratio: 0.0,
            guest_errors,
            qemu_guest_errors,
        };
        Ok(summary.compared())
    }

    /// Moves the guest by QEMU alone.
    ///
    /// Returns the move, the bytes that the guest uses, and the pages that it found wrong.
    fn by_itself(&mut self) -> Result<(Move, u64, u64)> {
        let dir = &self.stage.dir;
        let [a, b] = self.stage.network.hosts();
        self.progress.say("QEMU by itself: the guest boots".to_owned());
        let mut there = Qemu::start(dir, "b", b, self.boot, true, self.wait)?;
        let mut here = Qemu::start(dir, "a", a, self.boot, false, self.wait)?;
        let user = User::start(["a", "b"].map(|host| peer::serial(dir, host)));
        self.is_busy(&user, "QEMU by itself: when it had booted")?;
        self.progress.say("QEMU by itself: the guest moves from a to b".to_owned());
        let began = Instant::now();
        let (mut line, footprint) = here.migrate(&mut there, b.address(), self.wait)?;
        user.follow(1);
        // Some moved guests do not hear their serial port any more; that counts as silence, too.
        let over = Instant::now() + AFTER;
        let moved = |answer: &Answer| answer.at > over;
        let heard = self.answer_within(DEAF, &user, "QEMU by itself: when it had moved", moved);
        let wrong = heard.ok().or_else(|| user.last()).map_or(0, |answer| answer.wrong);
        let since = user.last().map_or(began, |answer| answer.at);
        line.silence_ms = milliseconds(user.longest_silence(began).max(since.elapsed()));
        Ok((line, footprint, wrong))
    }

    /// Moves the same guest, with its memory in the pool, to the other host and back.
    ///
    /// Returns both moves, and the pages that the guest found wrong.
    fn by_aquifer(&mut self, cache: Bytes) -> Result<([Move; 2], u64)> {
        let stage = self.stage;
        let [host_a, host_b] = &stage.hosts[..] else { unreachable!("there are two hosts") };
        self.progress.say("Aquifer: the guest boots".to_owned());
        let lender = format!("nbd+unix:///?socket={}", lender_socket(&stage.dir).display());
        let text = |path: &PathBuf| path.display().to_string();
        let Boot { qemu, kernel, initrd, append, memory, accelerator } = self.boot;
        let accelerator = accelerator.to_string();
        let (memory, cache) = (memory.0.to_string(), cache.0.to_string());
        let (qemu, kernel, initrd) = (text(qemu), text(kernel), text(initrd));
        let words =
            ["vm", "start", VM, "--memory", &memory, "--cache", &cache, "--lender", &lender];
        let more = [
            "--machine",
            MACHINE,
            "--accel",
            &accelerator,
            "--qemu",
            &qemu,
            "--kernel",
            &kernel,
            "--initrd",
            &initrd,
            "--append",
            append,
        ];
        let _: Value = ask(host_a, &[&words[..], &more].concat())?;
        let user = User::start(stage.serials(VM));
        self.is_busy(&user, "when it had booted")?;
        let mut moves = Vec::new();
        for (here, from, to, number) in [(host_a, "a", "b", 1), (host_b, "b", "a", 0)] {
            self.progress.say(format!("Aquifer: the guest moves from {from} to {to}"));
            let began = Instant::now();
            let report: MigrationReport = ask(here, &["vm", "migrate", VM, "--to", to])?;
            user.follow(number);
            let moved = format!("when it had moved to {to}");
            self.after(&user, &moved)?;
            moves.push(Move {
                silence_ms: milliseconds(user.longest_silence(began)),
                ..Move::of(&report)
            });
            self.is_busy(&user, &moved)?;
        }
        let wrong = user.last().map_or(0, |answer| answer.wrong);
        drop(user);
        let _: Value = ask(host_a, &["vm", "stop", VM, "--force"])?;
        let [there, back] =
            <[Move; 2]>::try_from(moves).unwrap_or_else(|_| unreachable!("it moved twice"));
        Ok(([there, back], wrong))
    }

    /// Waits until the guest has been busy for a while, from this call on.
    fn is_busy(&self, user: &User, when: &str) -> Result<()> {
        let first = self.answer_after(user, when, |_| true)?.tick;
        self.answer_after(user, when, |answer| answer.tick >= first + BUSY)?;
        Ok(())
    }

    /// Waits until `AFTER` has passed since a move; returns the number of wrong pages.
    fn after(&self, user: &User, when: &str) -> Result<u64> {
        let over = Instant::now() + AFTER;
        Ok(self.answer_after(user, when, |answer| answer.at > over)?.wrong)
    }

    fn answer_after(
        &self,
        user: &User,
        when: &str,
        is: impl Fn(&Answer) -> bool,
    ) -> Result<Answer> {
        self.answer_within(BOOTING, user, when, is)
    }

    fn answer_within(
        &self,
        timeout: Duration,
        user: &User,
        when: &str,
        is: impl Fn(&Answer) -> bool,
    ) -> Result<Answer> {
        let began = Instant::now();
        let before = match user.last() {
            Some(Answer { at, tick, .. }) => {
                format!(
                    "the last, tick {tick}, was {:?} before",
                    began.saturating_duration_since(at)
                )
            }
            None => "there was none before".to_owned(),
        };
        self.wait.until(
            &format!("waiting for the guest's answer ({when}; {before})"),
            timeout,
            || Ok(user.last().filter(|answer| answer.at > began && is(answer))),
        )
    }
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}
