//! The agent of a guest: `MON_agent` of \[Bielski18\], section III-B, and the agent's side of
//! `GM_lib`, section III-D.
//!
//! One thread waits for everything: the host, applications, pressure, and the next timer. The agent
//! never wakes a guest that has enough memory while the host wants no reports.

mod applications;
mod event_loop;
mod host;
mod link;
mod pending;
mod port;
mod socket;
#[cfg(test)]
mod tests;
mod watch;

use std::convert::Infallible;
use std::io;
use std::path::PathBuf;

use aquifer_procfs::set_oom_score;
use rustix::mm::{MlockAllFlags, mlockall};

use crate::application_message::SOCKET;
use crate::figures::Online;
use event_loop::Agent;

/// The kernel kills the agent last, except for processes that it must not kill: the agent can get
/// more memory.
const OOM_SCORE_ADJ: i32 = -900;

/// The agent's options.
#[derive(Clone, Debug)]
pub struct Options {
    /// The path to the host: a character device or a unix socket. `None` finds the port
    /// [`crate::message::PORT`] by its name.
    pub port: Option<PathBuf>,
    /// The socket for applications.
    pub socket: PathBuf,
    /// A group, by name or number, whose members may connect; root always may.
    pub socket_group: Option<String>,
    /// How added memory is brought online.
    pub online: Online,
    /// The root directory of the kernel's files: `/` except in tests.
    pub root: PathBuf,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            port: None,
            socket: PathBuf::from(SOCKET),
            socket_group: None,
            online: Online::default(),
            root: PathBuf::from("/"),
        }
    }
}

/// Runs the agent of this guest. The agent waits for the port and for the host, also after they
/// have gone.
///
/// # Errors
/// If another agent runs, the socket for applications cannot be made, or the kernel's files cannot
/// be read.
pub fn run(options: Options) -> io::Result<Infallible> {
    // Neither failure is fatal: a user other than root may try the agent.
    if let Err(error) = mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE) {
        eprintln!("aquifer-guest: cannot lock the agent's memory: {error}");
    }
    if let Err(error) = set_oom_score(OOM_SCORE_ADJ) {
        eprintln!("aquifer-guest: cannot lower the agent's OOM score: {error}");
    }
    let mut agent = Agent::start(options)?;
    loop {
        agent.run_once()?;
    }
}
