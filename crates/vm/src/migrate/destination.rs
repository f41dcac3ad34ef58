//! The destination of a migration.

use std::io::{ErrorKind, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_region::handover::Frame;
use aquifer_region::process::client as regions;
use serde_json::json;

use super::cpu::Cpu;
use super::message::{Incoming, Link, Message};
use super::postcopy;
use super::source::release;
use super::wire::Wire;
use crate::definition;
use crate::error::VmError;
use crate::process::Files;
use crate::qmp::Qmp;

/// Timeout of an answer of QEMU.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How long the source may take until it connects.
const CONNECTING: Duration = Duration::from_secs(30);

/// How long QEMU may take to load device state.
const LOADING: Duration = Duration::from_secs(20);

/// How long a source that may not know that the VM is here can still connect.
const CONFIRMING: Duration = Duration::from_secs(5);

/// The outcome of an incoming migration.
pub(crate) enum Outcome {
    /// The VM is here and belongs to this host. The rest of its memory, if any, comes over this
    /// connection.
    Here(Option<Box<Wire>>),
    /// The VM stays at the source, for this reason.
    Stays(String),
}

fn unclear(why: impl std::fmt::Display) -> VmError {
    VmError::Reported(format!("cannot compare processors: {why}"))
}

/// Checks that this host's processor offers the features of the one that an arriving VM runs on.
///
/// # Errors
/// [`VmError::UnlikeCpu`] names the missing features.
pub(crate) fn check_cpu(files: &Files, incoming: &Incoming) -> Result<(), VmError> {
    match &incoming.cpu {
        Some(there) => compare(files, &mut Qmp::connect(&files.mover(), TIMEOUT)?, there),
        None => Ok(()),
    }
}

fn compare(files: &Files, qmp: &mut Qmp, there: &Cpu) -> Result<(), VmError> {
    let model = files.whole_cpu()?;
    let model = model.ok_or_else(|| unclear("the VM has another processor model here"))?;
    Cpu::of(qmp, model)?.check_takes(there)
}

/// The end of one connection's messages.
enum End {
    Here(Box<Wire>),
    Stays(String),
}

/// Receives the VM for which this QEMU waits. `note` writes state that must outlive this process.
pub(crate) fn take_in(
    files: &Files,
    incoming: &Incoming,
    listener: &TcpListener,
    qemu: &mut Child,
    note: &mut dyn FnMut(&Incoming) -> Result<(), VmError>,
) -> Result<Outcome, VmError> {
    let fail = || VmError::io("cannot wait for the VM");
    listener.set_nonblocking(true).map_err(fail())?;
    let address = listener.local_addr().map_err(fail())?;
    let (qmp, version, owned) = (None, String::new(), None);
    let mut taking = Taking { files, incoming: incoming.clone(), qmp, version, address, owned };
    taking.version = release(&taking.qmp()?.execute("query-version", json!({}))?);
    let began = Instant::now();
    loop {
        if let Some(end) = qemu.try_wait().map_err(fail())? {
            if taking.owned.is_some() {
                return Ok(Outcome::Here(None));
            }
            return Ok(Outcome::Stays(format!("QEMU exited before the VM arrived: {end}")));
        }
        match Wire::accept(listener, &incoming.from, &incoming.identity) {
            Ok(wire) => match taking.converse(wire, note) {
                Ok(End::Here(wire)) => return Ok(Outcome::Here(Some(wire))),
                Ok(End::Stays(why)) => return Ok(Outcome::Stays(why)),
                Err(error) if !taking.incoming.prepared => {
                    return Ok(Outcome::Stays(error.to_string()));
                }
                Err(error) if taking.owned.is_some() => {
                    tracing::warn!(
                        "cannot confirm the arrival of the VM to host {}: {error}",
                        taking.incoming.from
                    );
                }
                Err(error) => {
                    tracing::warn!(
                        "waiting for host {} to hand the VM over or to keep it: {error}",
                        taking.incoming.from
                    );
                }
            },
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                match taking.owned {
                    // QEMU may need pages that were left behind; the thread that fetches them also
                    // answers the source.
                    Some(since)
                        if since.elapsed() > CONFIRMING
                            || taking.incoming.left_at_source.is_some() =>
                    {
                        return Ok(Outcome::Here(None));
                    }
                    Some(_) => {}
                    // If the source's hand-over is missing, an operator takes the VM over by its
                    // record.
                    None if taking.incoming.prepared && files.is_ours()? => {
                        taking.own(true, None)?;
                        return Ok(Outcome::Here(None));
                    }
                    None => {}
                }
                thread::sleep(Duration::from_millis(5));
            }
            Err(error) => tracing::warn!("refused a connection: {error}"),
        }
        if !taking.incoming.prepared && files.is_superseded() {
            return Ok(Outcome::Stays(format!("host {} begins again", incoming.from)));
        }
        if !taking.incoming.prepared && began.elapsed() > CONNECTING {
            return Ok(Outcome::Stays(format!("host {} did not connect", incoming.from)));
        }
    }
}

struct Taking<'a> {
    files: &'a Files,
    incoming: Incoming,
    qmp: Option<Qmp>,
    version: String,
    /// The address at which the source finds this host.
    address: SocketAddr,
    /// When the VM became this host's. From then on a repeated message of the source has no effect.
    owned: Option<Instant>,
}

impl Taking<'_> {
    fn qmp(&mut self) -> Result<&mut Qmp, VmError> {
        if self.qmp.is_none() {
            self.qmp = Some(Qmp::connect(&self.files.mover(), TIMEOUT)?);
        }
        self.qmp.as_mut().ok_or_else(|| VmError::Reported("QEMU's monitor is closed".to_owned()))
    }

    /// Handles the source's messages until it is settled which host owns the VM.
    fn converse(
        &mut self,
        mut wire: Wire,
        note: &mut dyn FnMut(&Incoming) -> Result<(), VmError>,
    ) -> Result<End, VmError> {
        let lost = || VmError::io("the connection to the source failed");
        let (mut devices, mut runs_there) = (None, false);
        let mut engine: Option<UnixStream> = None;
        loop {
            let (message, data) = wire.receive().map_err(lost())?;
            let done = match message {
                Message::Hello { migration, qemu, runs } => {
                    runs_there = runs;
                    self.hello(migration == self.incoming.migration, &qemu)
                        .and_then(|()| self.check_cpu(data))
                }
                Message::Alive => continue,
                Message::Engine(frame) => {
                    if engine.is_none() {
                        engine = Some(self.engine()?);
                    }
                    let Some(engine) = &mut engine else { continue };
                    let passed = pass_on(engine, &frame, data);
                    match (frame, passed) {
                        (Frame::Sync, passed) => passed,
                        (_, Ok(())) => continue,
                        (_, Err(error)) => return Err(error),
                    }
                }
                Message::Device => {
                    if devices.is_none() {
                        devices = Some(self.begin_loading(runs_there)?);
                    }
                    // QEMU may have to wait for pages first. If it is gone, `prepare` finds that.
                    _ = devices.as_ref().map(|devices| devices.send(data.to_vec()));
                    continue;
                }
                Message::Prepare { leaves } => {
                    drop(devices.take());
                    let fetched =
                        engine.as_mut().filter(|_| leaves).map(|engine| (&mut wire, engine));
                    self.prepare(fetched, note)
                }
                Message::CommitOwnership { runs } if self.incoming.prepared => {
                    let leaves = self.incoming.left_at_source.is_some();
                    if engine.is_none() && (leaves || self.owned.is_some()) {
                        engine = self.engine().ok();
                    }
                    // A source that missed the answer repeats the message. The VM may have been
                    // paused or resumed here since.
                    if self.owned.is_none() {
                        let engine = engine.as_mut().filter(|_| leaves);
                        self.own(runs, engine.map(|engine| (&mut wire, engine)))?;
                    }
                    wire.send(&Message::Done, &[]).map_err(lost())?;
                    if leaves {
                        return Ok(End::Here(Box::new(wire)));
                    }
                    // The list of hot pages is only a hint.
                    if let (Ok((Message::Engine(hot @ Frame::Hot(_)), _)), Some(engine)) =
                        (wire.receive(), &mut engine)
                    {
                        let _ = hot.send(engine, &[]);
                    }
                    return Ok(End::Here(Box::new(wire)));
                }
                Message::Drop if self.owned.is_none() => {
                    let _ = wire.send(&Message::Done, &[]);
                    return Ok(End::Stays(format!("host {} keeps the VM", self.incoming.from)));
                }
                other => Err(VmError::Reported(format!("unexpected message: {other:?}"))),
            };
            match done {
                Ok(()) => wire.send(&Message::Done, &[]).map_err(lost())?,
                Err(error) => {
                    wire.send(&Message::Failed(error.to_string()), &[]).map_err(lost())?;
                    return Err(error);
                }
            }
        }
    }

    /// Connects to the region's engine, with timeouts: an engine may be stopped.
    fn engine(&self) -> Result<UnixStream, VmError> {
        let fail = || VmError::io("cannot connect to the engine of the VM's region");
        let engine = regions::receive(&self.files.region())?;
        postcopy::end_waits(&engine).map_err(fail())?;
        Ok(engine)
    }

    fn hello(&self, is_it: bool, qemu: &str) -> Result<(), VmError> {
        if !is_it {
            let why = "this host waits for another migration of the VM";
            return Err(VmError::Reported(why.to_owned()));
        }
        if !self.incoming.prepared && qemu != self.version {
            let version = &self.version;
            return Err(VmError::Reported(format!(
                "this host has QEMU {version}, and the source has {qemu}: migration needs the same \
                 release on both"
            )));
        }
        Ok(())
    }

    /// Checks that this host's processor offers the features that the source sent. An older release
    /// sends none.
    fn check_cpu(&mut self, said: &[u8]) -> Result<(), VmError> {
        if self.incoming.prepared || said.is_empty() {
            return Ok(());
        }
        let there: Cpu = serde_json::from_slice(said).map_err(unclear)?;
        let files = self.files;
        compare(files, self.qmp()?, &there)
    }

    /// Makes QEMU load the device state that is sent to the returned channel. `runs_there` says
    /// that the VM is not paused at the source.
    fn begin_loading(&mut self, runs_there: bool) -> Result<Sender<Vec<u8>>, VmError> {
        let path = self.files.devices();
        let _ = std::fs::remove_file(&path);
        let uri = format!("unix:{}", path.display());
        let qmp = self.qmp()?;
        let capability = |name: &str| json!({ "capability": name, "state": true });
        let mut capabilities = vec![capability("x-ignore-shared")];
        if runs_there {
            // The disks stay the source's until QEMU resumes the VM. A paused one would not resume,
            // and QEMU 7.2 aborts when it moves a VM whose disks are not active.
            capabilities.push(capability("late-block-activate"));
        }
        qmp.execute("migrate-set-capabilities", json!({ "capabilities": capabilities }))?;
        qmp.execute("migrate-incoming", json!({ "uri": uri }))?;
        let fail = || VmError::io("QEMU does not receive the VM");
        let mut qemu = UnixStream::connect(&path).map_err(fail())?;
        let (devices, chunks) = mpsc::channel::<Vec<u8>>();
        let passing = move || chunks.iter().try_for_each(|chunk| qemu.write_all(&chunk));
        thread::Builder::new().name("devices".to_owned()).spawn(passing).map_err(fail())?;
        Ok(devices)
    }

    /// Waits until QEMU has loaded the device state, and fetches the pages that it needs for that
    /// meanwhile.
    fn prepare(
        &mut self,
        left_at_source: Option<(&mut Wire, &mut UnixStream)>,
        note: &mut dyn FnMut(&Incoming) -> Result<(), VmError>,
    ) -> Result<(), VmError> {
        let link = left_at_source.as_ref().map(|_| Link {
            migration: self.incoming.migration,
            host: self.incoming.from.clone(),
            address: self.address,
            identity: self.incoming.identity.clone(),
        });
        postcopy::fetch_while(left_at_source, || self.wait_until_loaded())?;
        let _ = std::fs::remove_file(self.files.devices());
        let cpu = None;
        let prepared =
            Incoming { prepared: true, left_at_source: link, cpu, ..self.incoming.clone() };
        note(&prepared)?;
        self.incoming = prepared;
        Ok(())
    }

    fn wait_until_loaded(&mut self) -> Result<(), VmError> {
        let deadline = Instant::now() + LOADING;
        loop {
            let state = self.qmp()?.execute("query-status", json!({}))?["status"].clone();
            let migration = self.qmp()?.migration()?;
            if migration == "failed" {
                return Err(VmError::Reported("QEMU cannot load the VM's devices".to_owned()));
            }
            if state != "inmigrate" {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(VmError::Reported(
                    "QEMU does not finish loading the VM's devices".to_owned(),
                ));
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Makes the VM this host's, even if it cannot run at once. If QEMU exits at this point, the VM
    /// stays the source's.
    fn own(
        &mut self,
        runs: bool,
        left_at_source: Option<(&mut Wire, &mut UnixStream)>,
    ) -> Result<(), VmError> {
        self.files.take_over()?;
        let gone_on = postcopy::fetch_while(left_at_source, || self.go_on(runs));
        if matches!(gone_on, Ok(false)) {
            // The region did not belong to this host yet, so that nothing was written to the pool:
            // the source still has the whole VM.
            self.files.wait_again(&self.incoming)?;
            return Err(VmError::Reported("QEMU exited when the VM resumed".to_owned()));
        }
        let owned = regions::own(&self.files.region()).map_err(VmError::from);
        if let Err(error) = gone_on.and(owned) {
            tracing::error!(
                "the VM is here but paused; resume it with 'aquifer vm resume': {error}"
            );
        }
        self.owned = Some(Instant::now());
        self.qmp = None;
        definition::settle(self.files);
        Ok(())
    }

    /// Returns false if QEMU has exited or is exiting.
    fn go_on(&mut self, runs: bool) -> Result<bool, VmError> {
        let command = if runs { "cont" } else { "query-status" };
        let answer = self.qmp().and_then(|qmp| qmp.execute(command, json!({})));
        match answer {
            Ok(_) => Ok(true),
            Err(VmError::Io { source, .. }) if is_gone(source.kind()) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Returns whether the peer is gone: QEMU closes its monitor when it exits.
fn is_gone(kind: ErrorKind) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, NotFound, UnexpectedEof};
    matches!(kind, BrokenPipe | ConnectionRefused | ConnectionReset | NotFound | UnexpectedEof)
}

/// Passes a frame on to the engine, and waits for the answer to a `Sync`.
fn pass_on(engine: &mut UnixStream, frame: &Frame, data: &[u8]) -> Result<(), VmError> {
    let fail = || VmError::io("the engine of the VM's region does not answer");
    frame.send(engine, data).map_err(fail())?;
    if *frame != Frame::Sync {
        return Ok(());
    }
    match Frame::receive(engine, &mut Vec::new()).map_err(fail())? {
        Some(Frame::Done) => Ok(()),
        Some(Frame::Failed(why)) => Err(VmError::Reported(why)),
        _ => Err(fail()(ErrorKind::UnexpectedEof.into())),
    }
}
