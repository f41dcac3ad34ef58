//! The bodies of a region's processes: the supervisor and the engine.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_control_socket::ControlSocket;
use aquifer_control_socket::first_word::{self, say};
use aquifer_page::RegionName;
use aquifer_procfs::end_oom_exemption;
use aquifer_region_client::{Listener, Reply, Request};
use aquifer_transport::accepting;
use aquifer_transport::tls::Identity;
use aquifer_volume::VolumeConfig;

use super::control::Serving;
use super::files::{Files, RegionSpec};
use super::message::Response;
use crate::engine::{Engine, EngineConfig};
use crate::error::RegionError;

/// The hidden subcommand of a program that starts regions. The program's `main` must pass the
/// arguments after it to [`run()`].
pub const SUBCOMMAND: [&str; 2] = ["serve", "region"];

/// The pause before the next engine, if the last one died sooner than this after its start.
const PAUSE: Duration = Duration::from_secs(1);

/// The exit code of an engine that never served.
const REFUSED: u8 = 3;

/// Runs the hidden subcommand: as `engine` one engine, otherwise the supervisor that starts
/// engines.
pub fn run(role: &str, directory: &Path, name: &RegionName) -> ExitCode {
    let files = Files::new(directory, name);
    match if role == "engine" { engine(&files) } else { supervise(&files) } {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            let _ = say(&Response::Failed { error: error.to_string() });
            ExitCode::from(REFUSED)
        }
    }
}

/// Starts an engine, and another whenever one dies, until one ends in order.
fn supervise(files: &Files) -> Result<(), RegionError> {
    let fail = || RegionError::io("cannot supervise the engine");
    rustix::process::setsid().map_err(io::Error::from).map_err(fail())?;
    end_oom_exemption().map_err(fail())?;
    std::env::set_current_dir("/").map_err(fail())?;
    let program = std::env::current_exe().map_err(fail())?;
    let _lock = files.become_supervisor()?;
    let mut first = true;
    loop {
        let began = Instant::now();
        let mut command = Command::new(&program);
        command
            .args(SUBCOMMAND)
            .arg("engine")
            .arg(files.directory())
            .arg(files.name().as_str())
            .stdin(Stdio::null());
        if !first {
            command.stdout(Stdio::null());
        }
        let mut child = command.spawn().map_err(fail())?;
        if first {
            // The starter, which waits for the first engine's first line, then sees the end of the
            // pipe there.
            first_word::is_said().map_err(fail())?;
        }
        let end = child.wait().map_err(fail())?;
        let is_gone = !files.record().exists();
        if end.success() || is_gone || (first && end.code() == Some(i32::from(REFUSED))) {
            return Ok(());
        }
        first = false;
        tracing::error!(
            code = end.code(),
            signal = end.signal(),
            "the engine of region '{}' ended: starting another",
            files.name()
        );
        if began.elapsed() < PAUSE {
            thread::sleep(PAUSE);
        }
    }
}

/// Serves the region until it is removed.
fn engine(files: &Files) -> Result<(), RegionError> {
    let spec = files.read()?;
    let lock = Files::open(&files.table())?;
    let fail = || RegionError::io("cannot start the engine");
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            return Err(RegionError::Misuse(format!(
                "region '{}' already has an engine",
                files.name()
            )));
        }
        Err(TryLockError::Error(error)) => return Err(fail()(error)),
    }
    let engine = Arc::new(open(files, &spec)?);
    let threads = engine.start().map_err(fail())?;
    let serving = Arc::new(Serving::new(files.clone(), spec, engine.clone()));
    serving.note_incarnations()?;
    let has_joined = serving.join()?;
    let member = serving.clone();
    thread::Builder::new()
        .name("quota".to_owned())
        .spawn(move || member.share_limits(has_joined))
        .map_err(fail())?;
    let listener = Listener::bind(&files.programs()).map_err(fail())?;
    let control = ControlSocket::bind(&files.control()).map_err(fail())?;
    let programs = engine.clone();
    thread::Builder::new()
        .name("programs".to_owned())
        .spawn(move || welcome(&programs, &listener))
        .map_err(fail())?;
    tracing::info!(region = %files.name(), "serving");
    let _ = say(&Response::Status(Box::new(serving.status())));
    first_word::is_said().map_err(fail())?;
    serving.serve_until_removed(control);
    engine.end();
    threads.into_iter().for_each(|thread| _ = thread.join());
    drop(lock);
    Ok(())
}

fn open(files: &Files, spec: &RegionSpec) -> Result<Engine, RegionError> {
    let config = EngineConfig {
        cache: spec.cache,
        may_be_unwatched: spec.began_local,
        paging: spec.paging.clone(),
        spill: spec.spill.clone(),
        disk: spec.disk.clone(),
        copies: spec.copies.clone(),
        foreign: files.is_foreign(),
    };
    let volume = VolumeConfig {
        id: spec.volume,
        capacity: spec.size,
        workers: 0,
        io_timeout: spec.io_timeout,
        tls: spec.identity.as_deref().map(Identity::load).transpose()?,
        // A region that is to have no lenders spills to a local file, for experiments.
        spill: (spec.leases.is_empty() && !spec.began_local).then(|| files.directory().to_owned()),
        ledger: None,
    };
    let paths = [files.region(), files.table(), files.extent_map(), files.sharers()];
    let [region, table, extent_map, sharers] = &paths;
    let open = |path: &Path| -> Result<File, RegionError> { Files::open(path) };
    let opened = [
        (region.as_path(), open(region)?),
        (table.as_path(), open(table)?),
        (extent_map.as_path(), open(extent_map)?),
        (sharers.as_path(), Files::open_or_make(sharers)?),
    ];
    let frames = files.group(&spec.group).frames();
    Engine::open(&config, volume, &spec.leases, opened, [files.mapped(), frames, files.watched()])
}

/// Accepts programs, each on a thread of its own.
fn welcome(engine: &Arc<Engine>, listener: &Listener) {
    accepting::each(
        "programs",
        || false,
        || listener.accept(),
        |connection| {
            let engine = engine.clone();
            let started = thread::Builder::new().name("program".to_owned()).spawn(move || {
                if let Err(error) = converse(&engine, connection) {
                    tracing::warn!("cannot serve a program: {error}");
                }
            });
            started.map(drop)
        },
    );
}

fn converse(engine: &Engine, connection: aquifer_region_client::Connection) -> io::Result<()> {
    while let Some((request, descriptors)) = connection.receive()? {
        match request {
            Request::Attach(attach) => {
                if let Ok(userfaults) = descriptors.try_into() {
                    return engine.attend(&attach, userfaults, connection);
                }
                let why = "the program sent no userfaultfds; use the same release for both";
                connection.send(&Reply::Refused(why.to_owned()), &[])?;
            }
            Request::Discard(pages) => {
                let reply = match engine.discard(pages) {
                    Ok(()) => Reply::Done,
                    Err(error) => Reply::Refused(error.to_string()),
                };
                connection.send(&reply, &[])?;
            }
            Request::Release(release) => {
                engine.release(connection.peer()?, &release);
                connection.send(&Reply::Done, &[])?;
            }
        }
    }
    Ok(())
}
