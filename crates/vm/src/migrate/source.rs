//! The source of a migration.

use std::fs;
use std::io::{self, Read as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::PAGE_SIZE;
use aquifer_region::handover::{Frame, Round, Sent};
use aquifer_region::process::client as regions;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde_json::{Value, json};

use super::cpu::Cpu;
use super::message::{HandedOver, Link, Message, MigrationReport, Mode, Order, Progress};
use super::postcopy;
use super::wire::Wire;
use crate::definition::{self, Held};
use crate::error::VmError;
use crate::process::{Files, release_disks};
use crate::qmp::Qmp;

/// Timeout of an answer of QEMU.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How long QEMU may take to stop the VM, and to save device state.
const SAVING: Duration = Duration::from_secs(20);

/// Most rounds while the VM runs.
const MOST_ROUNDS: u32 = 30;

/// Rounds end after this many in a row that hardly shrank.
const HOPELESS: u32 = 3;

/// How often progress is reported.
const TELLING: Duration = Duration::from_millis(200);

/// How long the source retries to tell the destination which host owns the VM.
const TELLING_AGAIN: Duration = Duration::from_secs(600);

/// The state that a failed migration restores: the VM runs here again.
struct Undo<'a> {
    files: &'a Files,
    runs: bool,
    /// Whether QEMU's migration was started.
    begun: bool,
    /// The VM's definition, if it has one.
    definition: Option<&'a Held>,
}

/// A migration in progress.
struct Move<'a> {
    files: &'a Files,
    order: &'a Order,
    qmp: Qmp,
    wire: Wire,
    engine: UnixStream,
    began: Instant,
    report: MigrationReport,
    progress: Progress,
    told: Instant,
    /// Reports progress; false cancels the migration.
    tell: &'a mut dyn FnMut(&Progress) -> bool,
}

/// Migrates the VM. `tell` receives the progress, and returns false to cancel. If this fails, the
/// VM is here and unchanged, unless the error says otherwise.
pub(crate) fn migrate(
    files: &Files,
    order: &Order,
    tell: &mut dyn FnMut(&Progress) -> bool,
) -> Result<MigrationReport, VmError> {
    let mut qmp = Qmp::connect(&files.mover(), TIMEOUT)?;
    let status = qmp.execute("query-status", json!({}))?;
    let runs = status["running"] == true;
    if !runs && status["status"] != "paused" {
        return Err(VmError::Misuse(format!(
            "cannot migrate a VM in the state {}",
            status["status"]
        )));
    }
    // Until the end, so that no command changes what the destination has.
    let definition = definition::hold(files)?;
    let mut undo = Undo { files, runs, begun: false, definition: definition.as_ref() };
    let moved =
        connect(files, order, (qmp, runs), tell).and_then(|mut moving| moving.go(&mut undo));
    // The record decides which host owns the VM, whatever failed.
    moved.inspect_err(|_| {
        if !files.is_handed_over() {
            undo.undo(order);
        }
    })
}

fn lost(order: &Order) -> impl FnOnce(io::Error) -> VmError {
    VmError::io(format!("cannot send the VM to host {}", order.to))
}

fn connect<'a>(
    files: &'a Files,
    order: &'a Order,
    (mut qmp, runs): (Qmp, bool),
    tell: &'a mut dyn FnMut(&Progress) -> bool,
) -> Result<Move<'a>, VmError> {
    let version = qmp.execute("query-version", json!({}))?;
    let cpu = match files.whole_cpu()? {
        Some(model) => serde_json::to_vec(&Cpu::of(&mut qmp, model)?).map_err(|error| {
            VmError::Reported(format!("cannot describe the VM's processor: {error}"))
        })?,
        None => Vec::new(),
    };
    let began = Instant::now();
    let mut wire = Wire::connect(order.address, &order.to, &order.identity).map_err(lost(order))?;
    let hello = Message::Hello { migration: order.migration, qemu: release(&version), runs };
    wire.send(&hello, &cpu).and_then(|()| wire.done()).map_err(lost(order))?;
    let engine = regions::send(&files.region())?;
    postcopy::end_waits(&engine)
        .map_err(VmError::io("cannot connect to the engine of the VM's region"))?;
    let report = MigrationReport { mode: order.mode, ..MigrationReport::default() };
    let (progress, told) = (Progress::default(), Instant::now());
    Ok(Move { files, order, qmp, wire, engine, began, report, progress, told, tell })
}

/// Returns QEMU's major and minor version: device state is only known to load within one release.
pub(super) fn release(version: &Value) -> String {
    format!("{}.{}", version["qemu"]["major"], version["qemu"]["minor"])
}

impl Move<'_> {
    fn go(&mut self, undo: &mut Undo<'_>) -> Result<MigrationReport, VmError> {
        let leaves = self.rounds()?;
        let devices = self.stop(undo)?;
        let stopped = Instant::now();
        self.phase("handing over")?;
        if leaves {
            self.report.mode = Mode::PostCopy;
            let last = self.round(Round::Leave)?;
            self.note_first(&last);
            self.report.left_pages = last.left_at_source;
        } else {
            self.report.last_pages = self.round(Round::Last)?.pages;
        }
        self.save_devices(&devices)?;
        // Pages that QEMU dirtied while it saved device state.
        self.round(Round::Rest)?;
        self.wire.send(&Message::Prepare { leaves }, &[]).map_err(lost(self.order))?;
        self.serve_pages().map_err(lost(self.order))?;
        self.tell_progress()?;
        self.hand_over(undo, leaves)?;
        self.report.downtime_ms = milliseconds(stopped);
        self.report.total_ms = milliseconds(self.began);
        if !leaves {
            self.tell_hot();
        }
        // The connection may be a newer one, which has sent less.
        self.report.bytes_metadata = self.wire.sent().saturating_sub(self.report.bytes_pages);
        if leaves {
            self.serve_all_pages()?;
            self.report.total_ms = milliseconds(self.began);
        }
        // QEMU has nothing left to do here.
        let _ = self.qmp.execute("quit", json!({}));
        Ok(self.report.clone())
    }

    /// Runs rounds until the downtime would be short. Returns true if the rest must be left behind.
    fn rounds(&mut self) -> Result<bool, VmError> {
        let (kind, phase) = match self.order.mode {
            Mode::Instant => (Round::Clean, "writing back to the pool"),
            Mode::PreCopy => (Round::Copy, "copying"),
            Mode::PostCopy => {
                self.round(Round::Tags)?;
                return Ok(true);
            }
        };
        let (mut before, mut hopeless) = (u64::MAX, 0);
        while self.report.rounds < MOST_ROUNDS {
            self.phase(phase)?;
            let began = Instant::now();
            let sent = self.round(kind)?;
            let pages = sent.pages + sent.cleaned;
            let took = began.elapsed().as_secs_f64();
            self.note_first(&sent);
            if self.report.rounds > 1 {
                self.progress.dirty_rate =
                    (pages as f64 * PAGE_SIZE as f64 / took.max(0.001)) as u64;
                // Extrapolates: each round shrinks by the same factor.
                let share = pages as f64 / before as f64;
                self.progress.remaining_ms =
                    (share < 1.0).then(|| took * 1000.0 * share / (1.0 - share));
            }
            // The last round takes as long as this one, and handles the pages dirtied during this
            // one.
            if took <= self.order.max_downtime.as_secs_f64() / 2.0 && self.report.rounds > 1
                || pages == 0
            {
                return Ok(false);
            }
            hopeless = if pages > before.saturating_mul(9) / 10 { hopeless + 1 } else { 0 };
            before = pages;
            if hopeless == HOPELESS {
                break;
            }
        }
        if self.order.may_leave {
            return Ok(true);
        }
        Err(VmError::Diverges { rounds: self.report.rounds, limit: self.order.max_downtime })
    }

    /// Notes the state of the cache at the start, from the first round.
    fn note_first(&mut self, sent: &Sent) {
        if self.report.rounds == 1 {
            self.report.resident_pages = sent.resident;
            self.report.dirty_pages = sent.dirty;
        }
    }

    fn round(&mut self, round: Round) -> Result<Sent, VmError> {
        let engine = || VmError::io("the engine of the VM's region does not answer");
        Frame::Round(round).send(&mut self.engine, &[]).map_err(engine())?;
        let mut data = Vec::new();
        let mut from = self.engine.try_clone().map_err(engine())?;
        let (began, before) = (Instant::now(), self.wire.sent());
        let sent = loop {
            let asked = Instant::now();
            while !self.has_answer().map_err(engine())? {
                // While the VM runs there is no timeout: the operator may cancel.
                if !matches!(round, Round::Clean | Round::Copy | Round::Tags)
                    && asked.elapsed() > postcopy::ENGINE
                {
                    let why = format!(
                        "the engine sent no answer within {:?} while the VM is paused",
                        postcopy::ENGINE
                    );
                    return Err(engine()(io::Error::new(io::ErrorKind::TimedOut, why)));
                }
                // Pages written to the pool do not pass through here.
                self.tell_progress()?;
                self.wire.send(&Message::Alive, &[]).map_err(lost(self.order))?;
            }
            match Frame::receive(&mut from, &mut data).map_err(engine())? {
                Some(Frame::Sent(sent)) => break sent,
                Some(Frame::Failed(why)) => return Err(VmError::Reported(why)),
                None => return Err(engine()(io::ErrorKind::UnexpectedEof.into())),
                Some(frame) => {
                    if matches!(frame, Frame::Pages(_)) {
                        self.report.bytes_pages += data.len() as u64;
                    }
                    self.wire.send(&Message::Engine(frame), &data).map_err(lost(self.order))?;
                    pace(self.order, began, self.wire.sent() - before);
                    self.tell_now_and_then()?;
                }
            }
        };
        let sync = Message::Engine(Frame::Sync);
        self.wire.send(&sync, &[]).and_then(|()| self.wire.done()).map_err(lost(self.order))?;
        if !matches!(round, Round::Rest | Round::Tags) {
            self.report.rounds += 1;
        }
        self.report.bytes_pool += sent.cleaned * PAGE_SIZE as u64;
        self.progress.pages = sent.pages + sent.cleaned;
        Ok(sent)
    }

    /// Waits, up to `TELLING`, until the engine has sent something.
    fn has_answer(&self) -> io::Result<bool> {
        let mut engine = [PollFd::new(&self.engine, PollFlags::IN)];
        let timeout = Timespec { tv_sec: 0, tv_nsec: TELLING.subsec_nanos().into() };
        match poll(&mut engine, Some(&timeout)) {
            Err(Errno::INTR) => Ok(false),
            ready => Ok(ready? > 0),
        }
    }

    /// Makes QEMU stop the VM. Device state arrives at the returned channel from then on.
    fn stop(&mut self, undo: &mut Undo<'_>) -> Result<Receiver<Vec<u8>>, VmError> {
        let path = self.files.devices();
        let fail = || VmError::io(format!("cannot listen at {}", path.display()));
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path).map_err(fail())?;
        let (chunks, devices) = mpsc::channel();
        thread::Builder::new()
            .name("devices".to_owned())
            .spawn(move || {
                let Ok((mut stream, _)) = listener.accept() else { return };
                let mut buffer = vec![0; 256 << 10];
                while let Ok(read @ 1..) = stream.read(&mut buffer) {
                    if chunks.send(buffer[..read].to_vec()).is_err() {
                        return;
                    }
                }
            })
            .map_err(fail())?;
        let capability = |name: &str| json!({ "capability": name, "state": true });
        let capabilities = [capability("x-ignore-shared"), capability("pause-before-switchover")];
        self.qmp.execute("migrate-set-capabilities", json!({ "capabilities": capabilities }))?;
        // Only device state passes through QEMU's migration, which is small: no limit.
        self.qmp.execute("migrate-set-parameters", json!({ "max-bandwidth": 1_u64 << 40 }))?;
        self.phase("stopping")?;
        undo.begun = true;
        self.qmp.execute("migrate", json!({ "uri": format!("unix:{}", path.display()) }))?;
        let deadline = Instant::now() + SAVING;
        loop {
            match self.qmp.migration()?.as_str() {
                "pre-switchover" => return Ok(devices),
                state @ ("failed" | "cancelled" | "completed") => {
                    return Err(VmError::Reported(format!(
                        "QEMU does not stop the VM: its migration is {state}"
                    )));
                }
                _ => self.send_devices(&devices)?,
            }
            if Instant::now() > deadline {
                return Err(VmError::Reported("QEMU does not stop the VM".to_owned()));
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn send_devices(&mut self, devices: &Receiver<Vec<u8>>) -> Result<(), VmError> {
        while let Ok(chunk) = devices.try_recv() {
            self.wire.send(&Message::Device, &chunk).map_err(lost(self.order))?;
        }
        Ok(())
    }

    /// Makes QEMU save device state, and sends it.
    fn save_devices(&mut self, devices: &Receiver<Vec<u8>>) -> Result<(), VmError> {
        self.qmp.execute("migrate-continue", json!({ "state": "pre-switchover" }))?;
        let deadline = Instant::now() + SAVING;
        loop {
            match devices.recv_timeout(Duration::from_millis(100)) {
                Ok(chunk) => self.wire.send(&Message::Device, &chunk).map_err(lost(self.order))?,
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) if Instant::now() > deadline => {
                    return Err(VmError::Reported(
                        "QEMU does not save the VM's devices".to_owned(),
                    ));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
        loop {
            match self.qmp.migration()?.as_str() {
                "completed" => return Ok(()),
                state @ ("failed" | "cancelled") => {
                    return Err(VmError::Reported(format!(
                        "QEMU does not save the VM's devices: {state}"
                    )));
                }
                state if Instant::now() > deadline => {
                    return Err(VmError::Reported(format!(
                        "QEMU does not complete its migration: {state}"
                    )));
                }
                _ => thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// Records that the VM belongs to the destination, and tells the destination. From the record
    /// on, the hand-over is final.
    fn hand_over(&mut self, undo: &Undo<'_>, leaves: bool) -> Result<(), VmError> {
        let runs = undo.runs;
        let engine = || VmError::io("the engine of the VM's region does not answer");
        Frame::GiveAway.send(&mut self.engine, &[]).map_err(engine())?;
        match Frame::receive(&mut self.engine, &mut Vec::new()).map_err(engine())? {
            Some(Frame::Done) => {}
            other => {
                return Err(VmError::Reported(format!(
                    "the engine does not release the region: {other:?}"
                )));
            }
        }
        let left_at_source = leaves.then(|| self.order.link());
        let handed_over = HandedOver {
            migration: self.order.migration,
            to: self.order.to.clone(),
            left_at_source,
            defined: self.order.defined,
        };
        // First: if this host loses power, it must not start the VM that the other host has.
        undo.definition.map_or(Ok(()), |definition| definition.leave(&handed_over))?;
        self.files.set_handed_over(Some(handed_over))?;
        release_disks(self.files);
        // Too late to cancel.
        let _ = self.phase("giving away");
        let own = Message::CommitOwnership { runs };
        // The destination's `Done` ends `serve_pages`, also if nothing was left.
        let told = self.wire.send(&own, &[]).and_then(|()| self.serve_pages());
        let Err(error) = told else { return Ok(()) };
        tracing::warn!("host {} did not confirm the hand-over: {error}", self.order.to);
        let region = self.files.region();
        let until_done = |wire: &mut Wire| {
            let mut engine = regions::send(&region).map_err(io::Error::other)?;
            postcopy::end_waits(&engine)?;
            postcopy::serve(wire, &mut engine, &mut |_, _| ())
        };
        // Tell the client that the retries go on.
        let Self { tell, progress, order, .. } = &mut *self;
        let told = tell_again(&order.link(), &own, &until_done, &mut || _ = tell(progress));
        self.wire = told.ok_or_else(|| VmError::Unconfirmed {
            name: self.files.name().clone(),
            to: self.order.to.clone(),
            why: error.to_string(),
        })?;
        Ok(())
    }

    /// Sends the pages that the destination asks for, until it is done.
    fn serve_pages(&mut self) -> io::Result<()> {
        let report = &mut self.report;
        postcopy::serve(&mut self.wire, &mut self.engine, &mut |pages, _| {
            report.bytes_pages += pages;
        })
    }

    /// Does the same until the destination has all pages, over new connections if need be.
    fn serve_all_pages(&mut self) -> Result<(), VmError> {
        let _ = self.phase("sending the pages left at the source");
        let Self { files, order, report, progress, wire, tell, .. } = self;
        let (began, before) = (Instant::now(), wire.sent());
        postcopy::serve_all(files, &order.link(), Some(wire), &mut |pages, sent| {
            report.bytes_pages += pages;
            progress.bytes_sent += pages;
            tell(progress);
            pace(order, began, sent.saturating_sub(before));
        })
    }

    /// Tells the destination which pages are hot. The list is only a hint, so errors are ignored.
    fn tell_hot(&mut self) {
        if self.order.mode == Mode::PreCopy || Frame::TellHot.send(&mut self.engine, &[]).is_err() {
            return;
        }
        if let Ok(Some(frame @ Frame::Hot(_))) = Frame::receive(&mut self.engine, &mut Vec::new()) {
            let _ = self.wire.send(&Message::Engine(frame), &[]);
        }
    }

    fn phase(&mut self, phase: &str) -> Result<(), VmError> {
        phase.clone_into(&mut self.progress.phase);
        self.tell_progress()
    }

    fn tell_now_and_then(&mut self) -> Result<(), VmError> {
        if self.told.elapsed() < TELLING { Ok(()) } else { self.tell_progress() }
    }

    fn tell_progress(&mut self) -> Result<(), VmError> {
        self.told = Instant::now();
        self.progress.rounds = self.report.rounds;
        self.progress.bytes_sent = self.wire.sent();
        self.progress.bytes_pool = self.report.bytes_pool;
        self.progress.elapsed_ms = milliseconds(self.began);
        if (self.tell)(&self.progress) { Ok(()) } else { Err(VmError::Cancelled) }
    }
}

/// Sleeps so that `sent` bytes since `began` do not exceed the bandwidth limit.
fn pace(order: &Order, began: Instant, sent: u64) {
    if let Some(bandwidth) = order.bandwidth {
        let due = Duration::from_secs_f64(sent as f64 / bandwidth.0.max(1) as f64);
        thread::sleep(due.saturating_sub(began.elapsed()));
    }
}

/// Tells the destination which host owns the VM, with retries until it confirms. Returns that
/// connection.
fn tell_again(
    link: &Link,
    what: &Message,
    until_done: &dyn Fn(&mut Wire) -> io::Result<()>,
    try_again: &mut dyn FnMut(),
) -> Option<Wire> {
    let deadline = Instant::now() + TELLING_AGAIN;
    while Instant::now() < deadline {
        try_again();
        let told = Wire::greet(link).and_then(|mut wire| {
            wire.send(what, &[])?;
            until_done(&mut wire)?;
            Ok(wire)
        });
        match told {
            Ok(wire) => return Some(wire),
            // The destination's supervisor no longer waits.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => return None,
            Err(_) => thread::sleep(Duration::from_millis(500)),
        }
    }
    None
}

impl Undo<'_> {
    fn undo(&self, order: &Order) {
        let undone = resume(self.files, self.begun && self.runs);
        if let Err(error) = undone {
            tracing::error!("the VM stays here, but cannot resume: {error}");
        }
        if let Some(Err(error)) = self.definition.map(|definition| definition.settle(self.files)) {
            tracing::warn!("cannot unmark the definition of the VM, which stays here: {error}");
        }
        if self.begun {
            // The destination may be waiting for the hand-over.
            let link = order.link();
            let told = thread::Builder::new().name("drop".to_owned());
            let _ = told.spawn(move || tell_again(&link, &Message::Drop, &Wire::done, &mut || ()));
        }
    }
}

/// Cancels QEMU's migration, makes the region this host's and, if `runs`, resumes the VM.
pub(crate) fn resume(files: &Files, runs: bool) -> Result<(), VmError> {
    let mut qmp = Qmp::connect(&files.mover(), TIMEOUT)?;
    let deadline = Instant::now() + TIMEOUT;
    while matches!(
        qmp.migration()?.as_str(),
        "setup" | "active" | "pre-switchover" | "device" | "cancelling" | "wait-unplug"
    ) {
        // The migration may have ended meanwhile.
        let _ = qmp.execute("migrate_cancel", json!({}));
        if Instant::now() > deadline {
            return Err(VmError::Reported("QEMU does not cancel its migration".to_owned()));
        }
        thread::sleep(Duration::from_millis(5));
    }
    let _ = fs::remove_file(files.devices());
    regions::own(&files.region())?;
    if runs {
        qmp.execute("cont", json!({}))?;
    }
    Ok(())
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}
