//! The body of a volume process and of its swapoff helper.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;

use aquifer_control_socket::first_word::{is_said, say};
use rustix::event::{PollFd, PollFlags, Timespec};
use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::message::{KEEP, Response};
use super::serving::Serving;
use super::spec::VolumeSpec;
use super::{ProcessError, control, swap_off};
use crate::{safety, sys};

/// The task of the process: one JSON object on a line of its standard input.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Task {
    /// Serves a volume until it is detached.
    Serve(Box<VolumeSpec>),
    /// Turns swap off on behalf of the process that serves the device.
    SwapOff {
        /// The block device.
        device: PathBuf,
    },
}

/// Runs the hidden subcommand by which [`super::client::spawn`] starts a volume process.
///
/// The program must call it before it starts a thread. The function reads its task from standard
/// input. For a volume, the first line on standard output is a [`Response`]: the status of the
/// served volume, or the failure.
pub fn run() -> ExitCode {
    let mut text = String::new();
    let task = io::stdin().read_line(&mut text).and_then(|_| Ok(serde_json::from_str(&text)?));
    let result = match task {
        Ok(Task::Serve(spec)) => serve(&spec),
        Ok(Task::SwapOff { device }) => {
            swap_off::helper(&device).map_err(ProcessError::io("cannot report the swapoff"))
        }
        Err(error) => Err(ProcessError::io(
            "cannot read the task on standard input (only Aquifer runs this command)",
        )(error)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            // The write fails if the starter is gone; the log has the error too.
            let _ = say(&Response::Failed { error: error.to_string() });
            ExitCode::FAILURE
        }
    }
}

/// Detaches from the starter, makes the device, reports to the starter, and serves until the volume
/// is detached.
fn serve(spec: &VolumeSpec) -> Result<(), ProcessError> {
    if leave_starter()
        .map_err(ProcessError::io("cannot fork from the process that started this one"))?
    {
        return Ok(());
    }
    let safety = safety::protect();
    for rule in safety.0.iter().filter(|rule| rule.failed.is_some()) {
        tracing::warn!(rule.rule, rule.failed, "the swap path lacks a protection");
    }
    let serving = Arc::new(Serving::start(spec, safety)?);
    let (finish, finished) = mpsc::channel();
    if let Err(error) = open_to_requests(&serving, &finish) {
        // The first error is the one to report.
        let _ = serving.detach(|_| ());
        return Err(error);
    }
    let record = serving.record();
    tracing::info!(
        volume = %spec.volume,
        device = %record.device.display(),
        backend = %record.backend,
        "serving"
    );
    // A failed write is ignored: `listen_to_starter` notices that the starter is gone.
    let _ = say(&Response::Status(Box::new(serving.status())));
    let _ = is_said();
    listen_to_starter(serving, finish).map_err(ProcessError::io("cannot watch the starter"))?;
    // The thread that detaches the volume sends this message once it has answered.
    let _ = finished.recv();
    tracing::info!(volume = %spec.volume, "detached");
    Ok(())
}

/// Turns swap on, if requested, and starts to accept requests and signals.
fn open_to_requests(serving: &Arc<Serving>, finish: &mpsc::Sender<()>) -> Result<(), ProcessError> {
    let socket = control::bind(serving)?;
    watch_signals(serving.clone(), finish.clone())
        .map_err(ProcessError::io("cannot watch for signals"))?;
    if starter_has_left().map_err(ProcessError::io("cannot check whether the starter runs"))? {
        return Err(ProcessError::Refused(
            "the process that requested the volume has ended".to_owned(),
        ));
    }
    serving.swap_on()?;
    control::listen(socket, serving.clone(), finish.clone())
}

/// Continues in a forked child with a session of its own, so that it survives the starter and the
/// starter's terminal. Returns true in the parent, which has nothing more to do.
fn leave_starter() -> io::Result<bool> {
    if sys::fork()? {
        return Ok(true);
    }
    rustix::process::setsid()?;
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    std::env::set_current_dir("/")?;
    Ok(false)
}

/// Tells whether the other end of standard input is closed.
fn starter_has_left() -> io::Result<bool> {
    let stdin = io::stdin();
    let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
    rustix::event::poll(&mut fds, Some(&Timespec::default()))?;
    Ok(fds[0].revents().contains(PollFlags::HUP))
}

/// Detaches the volume if the starter ends before it has sent [`KEEP`].
fn listen_to_starter(serving: Arc<Serving>, finish: mpsc::Sender<()>) -> io::Result<()> {
    thread::Builder::new().name("starter".to_owned()).spawn(move || {
        let mut word = String::new();
        let heard = io::stdin().read_line(&mut word);
        if heard.is_ok() && word == KEEP {
            // On an error the pipe stays open, which is harmless.
            let _ = File::open("/dev/null").map(rustix::stdio::dup2_stdin);
            return;
        }
        tracing::warn!(
            "the process that requested the volume ended before it confirmed the volume: detaching"
        );
        match serving.detach(|_| ()) {
            Ok(()) => _ = finish.send(()),
            Err(error) => tracing::error!("{error}; the volume is still served"),
        }
    })?;
    Ok(())
}

/// Detaches the volume on SIGTERM or SIGINT, and ignores SIGHUP. If the detach is refused, the
/// volume stays served.
fn watch_signals(serving: Arc<Serving>, finish: mpsc::Sender<()>) -> io::Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for signal in signals.forever().filter(|signal| *signal != SIGHUP) {
            tracing::info!(signal, "received a signal to end: detaching");
            match serving.detach(|_| ()) {
                Ok(()) => _ = finish.send(()),
                Err(error) => tracing::error!("{error}; the volume is still served"),
            }
        }
    })?;
    Ok(())
}
