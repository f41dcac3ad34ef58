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
use super::left;
use super::message::{Awaited, Link, Message};
use super::source::release;
use super::wire::Wire;
use crate::error::GuestError;
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

/// The end of one connection's messages.
enum End {
    Here(Box<Wire>),
    Stays(String),
}

/// Receives the VM for which this QEMU waits. `note` writes state that must outlive this process.
pub(crate) fn take_in(
    files: &Files,
    awaited: &Awaited,
    listener: &TcpListener,
    qemu: &mut Child,
    note: &mut dyn FnMut(&Awaited) -> Result<(), GuestError>,
) -> Result<Outcome, GuestError> {
    let fail = || GuestError::io("cannot wait for the VM");
    listener.set_nonblocking(true).map_err(fail())?;
    let address = listener.local_addr().map_err(fail())?;
    let (qmp, version, owned) = (None, String::new(), None);
    let mut taking = Taking { files, awaited: awaited.clone(), qmp, version, address, owned };
    taking.version = release(&taking.qmp()?.execute("query-version", json!({}))?);
    let began = Instant::now();
    loop {
        if let Some(end) = qemu.try_wait().map_err(fail())? {
            if taking.owned.is_some() {
                return Ok(Outcome::Here(None));
            }
            return Ok(Outcome::Stays(format!("QEMU has ended before the VM was here: {end}")));
        }
        match Wire::accept(listener, &awaited.from, &awaited.identity) {
            Ok(wire) => match taking.converse(wire, note) {
                Ok(End::Here(wire)) => return Ok(Outcome::Here(Some(wire))),
                Ok(End::Stays(why)) => return Ok(Outcome::Stays(why)),
                Err(error) if !taking.awaited.prepared => {
                    return Ok(Outcome::Stays(error.to_string()));
                }
                Err(error) if taking.owned.is_some() => {
                    tracing::warn!(
                        "host {} may not know that the VM is here: {error}",
                        taking.awaited.from
                    );
                }
                Err(error) => {
                    tracing::warn!(
                        "whose the VM is, host {} has to say: {error}",
                        taking.awaited.from
                    );
                }
            },
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                match taking.owned {
                    // QEMU may need pages that were left behind; the thread that fetches them also
                    // answers the source.
                    Some(since)
                        if since.elapsed() > CONFIRMING || taking.awaited.left.is_some() =>
                    {
                        return Ok(Outcome::Here(None));
                    }
                    Some(_) => {}
                    // If the source's hand-over is missing, an operator takes the VM over by its
                    // record.
                    None if taking.awaited.prepared && files.is_ours()? => {
                        taking.own(true, None)?;
                        return Ok(Outcome::Here(None));
                    }
                    None => {}
                }
                thread::sleep(Duration::from_millis(5));
            }
            Err(error) => tracing::warn!("turned away who connected: {error}"),
        }
        if !taking.awaited.prepared && began.elapsed() > CONNECTING {
            return Ok(Outcome::Stays(format!("host {} did not connect", awaited.from)));
        }
    }
}

struct Taking<'a> {
    files: &'a Files,
    awaited: Awaited,
    qmp: Option<Qmp>,
    version: String,
    /// The address at which the source finds this host.
    address: SocketAddr,
    /// When the VM became this host's. From then on a repeated message of the source has no effect.
    owned: Option<Instant>,
}

impl Taking<'_> {
    fn qmp(&mut self) -> Result<&mut Qmp, GuestError> {
        if self.qmp.is_none() {
            self.qmp = Some(Qmp::connect(&self.files.mover(), TIMEOUT)?);
        }
        self.qmp.as_mut().ok_or_else(|| GuestError::Keeper("no QEMU".to_owned()))
    }

    /// Handles the source's messages until it is settled which host owns the VM.
    fn converse(
        &mut self,
        mut wire: Wire,
        note: &mut dyn FnMut(&Awaited) -> Result<(), GuestError>,
    ) -> Result<End, GuestError> {
        let lost = || GuestError::io("the other host has gone");
        let mut devices = None;
        let mut engine: Option<UnixStream> = None;
        loop {
            let (message, data) = wire.receive().map_err(lost())?;
            let done = match message {
                Message::Hello { migration, qemu } => self
                    .hello(migration == self.awaited.migration, &qemu)
                    .and_then(|()| self.check_cpu(data)),
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
                        devices = Some(self.begin_loading()?);
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
                Message::Own { runs } if self.awaited.prepared => {
                    if engine.is_none() && (self.awaited.left.is_some() || self.owned.is_some()) {
                        engine = self.engine().ok();
                    }
                    // A source that missed the answer repeats the message. The VM may have been
                    // paused or resumed here since.
                    if self.owned.is_none() {
                        let left = engine.as_mut().filter(|_| self.awaited.left.is_some());
                        self.own(runs, left.map(|engine| (&mut wire, engine)))?;
                    }
                    wire.send(&Message::Done, &[]).map_err(lost())?;
                    if self.awaited.left.is_some() {
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
                    return Ok(End::Stays(format!("host {} keeps it", self.awaited.from)));
                }
                other => Err(GuestError::Keeper(format!("{other:?} makes no sense now"))),
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
    fn engine(&self) -> Result<UnixStream, GuestError> {
        let fail = || GuestError::io("cannot speak with the engine of the VM's region");
        let engine = regions::receive(&self.files.region())?;
        left::end_waits(&engine).map_err(fail())?;
        Ok(engine)
    }

    fn hello(&self, is_it: bool, qemu: &str) -> Result<(), GuestError> {
        if !is_it {
            return Err(GuestError::Keeper("another attempt to move the VM is awaited".to_owned()));
        }
        if !self.awaited.prepared && qemu != self.version {
            let version = &self.version;
            return Err(GuestError::Keeper(format!(
                "QEMU here is {version}, and {qemu} there: a VM moves between hosts with the same release of it"
            )));
        }
        Ok(())
    }

    /// Checks that this host's processor offers the features that the source sent. An older release
    /// sends none.
    fn check_cpu(&mut self, said: &[u8]) -> Result<(), GuestError> {
        if self.awaited.prepared || said.is_empty() {
            return Ok(());
        }
        let unclear = |why: String| GuestError::Keeper(format!("cannot compare processors: {why}"));
        let there: Cpu =
            serde_json::from_slice(said).map_err(|error| unclear(error.to_string()))?;
        let model = self.files.whole_cpu()?;
        let model = model.ok_or_else(|| unclear("the VM has another one here".to_owned()))?;
        Cpu::of(self.qmp()?, model)?.check_takes(&there)
    }

    /// Makes QEMU load the device state that is sent to the returned channel.
    fn begin_loading(&mut self) -> Result<Sender<Vec<u8>>, GuestError> {
        let path = self.files.devices();
        let _ = std::fs::remove_file(&path);
        let uri = format!("unix:{}", path.display());
        let qmp = self.qmp()?;
        let capabilities = [json!({ "capability": "x-ignore-shared", "state": true })];
        qmp.execute("migrate-set-capabilities", json!({ "capabilities": capabilities }))?;
        qmp.execute("migrate-incoming", json!({ "uri": uri }))?;
        let fail = || GuestError::io("QEMU does not take in the VM");
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
        left: Option<(&mut Wire, &mut UnixStream)>,
        note: &mut dyn FnMut(&Awaited) -> Result<(), GuestError>,
    ) -> Result<(), GuestError> {
        let link = left.as_ref().map(|_| Link {
            migration: self.awaited.migration,
            host: self.awaited.from.clone(),
            address: self.address,
            identity: self.awaited.identity.clone(),
        });
        left::fetch_while(left, || self.wait_until_loaded())?;
        let _ = std::fs::remove_file(self.files.devices());
        let prepared = Awaited { prepared: true, left: link, ..self.awaited.clone() };
        note(&prepared)?;
        self.awaited = prepared;
        Ok(())
    }

    fn wait_until_loaded(&mut self) -> Result<(), GuestError> {
        let deadline = Instant::now() + LOADING;
        loop {
            let state = self.qmp()?.execute("query-status", json!({}))?["status"].clone();
            let migration = self.qmp()?.migration()?;
            if migration == "failed" {
                return Err(GuestError::Keeper("QEMU cannot load the VM's devices".to_owned()));
            }
            if state != "inmigrate" {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(GuestError::Keeper(
                    "QEMU does not come to an end of loading".to_owned(),
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
        left: Option<(&mut Wire, &mut UnixStream)>,
    ) -> Result<(), GuestError> {
        self.files.take_over()?;
        let gone_on = left::fetch_while(left, || self.go_on(runs));
        if matches!(gone_on, Ok(false)) {
            // The region did not belong to this host yet, so that nothing was written to the pool:
            // the source still has the whole VM.
            self.files.wait_again(&self.awaited)?;
            return Err(GuestError::Keeper("QEMU has ended as the VM was to go on".to_owned()));
        }
        let owned = regions::own(&self.files.region()).map_err(GuestError::from);
        if let Err(error) = gone_on.and(owned) {
            tracing::error!(
                "the VM is here, but stands still ('aquifer vm resume' has it go on): {error}"
            );
        }
        self.owned = Some(Instant::now());
        self.qmp = None;
        Ok(())
    }

    /// Returns false if QEMU has exited or is exiting.
    fn go_on(&mut self, runs: bool) -> Result<bool, GuestError> {
        let command = if runs { "cont" } else { "query-status" };
        let answer = self.qmp().and_then(|qmp| qmp.execute(command, json!({})));
        match answer {
            Ok(_) => Ok(true),
            Err(GuestError::Io { source, .. }) if is_gone(source.kind()) => Ok(false),
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
fn pass_on(engine: &mut UnixStream, frame: &Frame, data: &[u8]) -> Result<(), GuestError> {
    let fail = || GuestError::io("the engine of the VM's region does not answer");
    frame.send(engine, data).map_err(fail())?;
    if *frame != Frame::Sync {
        return Ok(());
    }
    match Frame::receive(engine, &mut Vec::new()).map_err(fail())? {
        Some(Frame::Done) => Ok(()),
        Some(Frame::Failed(why)) => Err(GuestError::Keeper(why)),
        _ => Err(fail()(ErrorKind::UnexpectedEof.into())),
    }
}
