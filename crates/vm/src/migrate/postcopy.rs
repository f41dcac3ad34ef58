//! The memory that was left behind (post-copy): the destination asks the source for pages, and the
//! source sends them. If the connection breaks, the source reconnects as long as both hosts have
//! the VM, and the destination may ask for the same pages again.

use std::io;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use aquifer_region::handover::Frame;
use aquifer_region::process::client as regions;

use super::message::{Link, Message};
use super::wire::Wire;
use crate::error::VmError;
use crate::process::Files;

/// Pause before a retry.
const PAUSE: Duration = Duration::from_millis(200);

/// How often faults on missing pages are polled.
const FAULT_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Timeout of an engine's answer, and of writing to an engine.
pub(super) const ENGINE: Duration = Duration::from_secs(60);

/// Sets the timeouts of a connection to an engine, which may be stopped.
pub(super) fn end_waits(engine: &UnixStream) -> io::Result<()> {
    engine.set_read_timeout(Some(ENGINE))?;
    engine.set_write_timeout(Some(ENGINE))
}

fn failed(why: impl Into<String>) -> io::Error {
    io::Error::other(why.into())
}

/// Sends the pages that the destination asks for, until it is done. `sent` receives the bytes of
/// pages of each answer, and the bytes sent over the connection so far.
pub(super) fn serve(
    wire: &mut Wire,
    engine: &mut UnixStream,
    sent: &mut dyn FnMut(u64, u64),
) -> io::Result<()> {
    let mut data = Vec::new();
    loop {
        match wire.receive()?.0 {
            Message::Engine(want @ Frame::Want(_)) => want.send(engine, &[])?,
            Message::Done => return Ok(()),
            Message::Failed(why) => return Err(failed(why)),
            other => {
                return Err(failed(format!("unexpected message instead of a request: {other:?}")));
            }
        }
        let mut pages = 0;
        loop {
            match Frame::receive(engine, &mut data)? {
                Some(frame @ Frame::Pages(_)) => {
                    pages += data.len() as u64;
                    wire.send(&Message::Engine(frame), &data)?;
                }
                Some(done @ Frame::Done) => break wire.send(&Message::Engine(done), &[])?,
                Some(Frame::Failed(why)) => return Err(failed(why)),
                _ => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
        sent(pages, wire.sent());
    }
}

/// Does the same, over one connection after the other, until the destination has all pages.
///
/// # Errors
/// [`VmError::Reported`] if QEMU exits here before that; [`VmError::Io`] if the end cannot be
/// noted.
pub(crate) fn serve_all(
    files: &Files,
    link: &Link,
    mut first: Option<&mut Wire>,
    sent: &mut dyn FnMut(u64, u64),
) -> Result<(), VmError> {
    let mut told = false;
    loop {
        let mut serve_once = || {
            let mut another = None;
            let wire = match first.take() {
                Some(wire) => wire,
                None => another.insert(Wire::greet(link)?),
            };
            let served = regions::send(&files.region()).map_err(io::Error::other);
            let served = served.and_then(|engine| end_waits(&engine).map(|()| engine));
            served
                .and_then(|mut engine| serve(wire, &mut engine, sent))
                .inspect_err(|_| wire.break_off())?;
            // If this is lost, the destination waits for it only while the VM exists.
            let _ = wire.send(&Message::Done, &[]);
            Ok::<_, io::Error>(())
        };
        let Err(error) = serve_once() else { return files.note_all_sent() };
        if !std::mem::replace(&mut told, true) {
            tracing::warn!("host {} does not have all of the VM's memory yet: {error}", link.host);
        }
        if !files.is_running() {
            return Err(VmError::Reported(
                "QEMU exited on this host before it sent all of the VM's memory".to_owned(),
            ));
        }
        // Tell the client that the retries go on.
        sent(0, 0);
        thread::sleep(PAUSE);
    }
}

/// Asks the source for some of the missing pages and passes them to the engine: those that faults
/// wait for, or any if `all`. Returns true once none is missing.
pub(super) fn fetch(wire: &mut Wire, engine: &mut UnixStream, all: bool) -> io::Result<bool> {
    Frame::Next { all }.send(engine, &[])?;
    match Frame::receive(engine, &mut Vec::new())? {
        Some(Frame::Want(pages)) if pages.is_empty() => return Ok(false),
        Some(want @ Frame::Want(_)) => wire.send(&Message::Engine(want), &[])?,
        Some(Frame::Done) => return Ok(true),
        Some(Frame::Failed(why)) => return Err(failed(why)),
        _ => return Err(io::ErrorKind::UnexpectedEof.into()),
    }
    loop {
        match wire.receive()? {
            (Message::Engine(pages @ Frame::Pages(_)), data) => pages.send(engine, data)?,
            (Message::Engine(Frame::Done), _) => return Ok(false),
            // The source has not heard that the VM is here.
            (Message::CommitOwnership { .. }, _) => wire.send(&Message::Done, &[])?,
            (other, _) => {
                return Err(failed(format!("unexpected message instead of pages: {other:?}")));
            }
        }
    }
}

/// Runs `what`, during which QEMU may need missing pages. Meanwhile fetches the pages that faults
/// wait for.
pub(super) fn fetch_while<T: Send>(
    left_at_source: Option<(&mut Wire, &mut UnixStream)>,
    what: impl FnOnce() -> Result<T, VmError> + Send,
) -> Result<T, VmError> {
    let Some((wire, engine)) = left_at_source else { return what() };
    thread::scope(|scope| {
        let doing = scope.spawn(what);
        while !doing.is_finished() {
            if let Err(error) = fetch(wire, engine, false) {
                // `what` may succeed without these pages, and fails if not.
                tracing::warn!("cannot fetch pages left at the source: {error}");
                break;
            }
            thread::sleep(FAULT_POLL_INTERVAL);
        }
        doing.join().unwrap_or_else(|_| Err(VmError::Reported("a thread panicked".to_owned())))
    })
}

/// Fetches all missing pages, until none is left or the VM ends. Without a connection, the source
/// reconnects at `listener`.
pub(crate) fn fetch_all(
    files: &Files,
    link: &Link,
    listener: &TcpListener,
    mut wire: Option<Wire>,
) {
    let mut told = false;
    while files.is_alive() {
        let mut fetch_once = || {
            let over = wire.as_mut().ok_or(io::ErrorKind::NotConnected)?;
            let mut engine = regions::receive(&files.region()).map_err(io::Error::other)?;
            end_waits(&engine)?;
            while !fetch(over, &mut engine, true)? {}
            over.send(&Message::Done, &[])?;
            over.done()
        };
        match fetch_once() {
            Ok(()) => {
                tracing::info!("all of the VM's memory arrived from host {}", link.host);
                if let Err(error) = files.note_all_arrived() {
                    tracing::error!("cannot record that all of the VM's memory arrived: {error}");
                }
                return;
            }
            Err(error) if error.kind() == io::ErrorKind::NotConnected => {}
            Err(error) if !told => {
                tracing::warn!("host {} still holds some of the VM's memory: {error}", link.host);
                told = true;
            }
            Err(_) => {}
        }
        if files.is_alive() {
            thread::sleep(PAUSE);
            wire = Wire::greeted(listener, link).ok();
        }
    }
    // The source may drop the pages.
    if let Some(wire) = &mut wire {
        let _ = wire.send(&Message::Done, &[]);
    }
}
