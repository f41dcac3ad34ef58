//! The agent of a guest: `MON_agent` of Bielski et al. 2018, section III-B, and what is behind `GM_lib` of its section III-D.
//!
//! One thread that waits for everything at once: the host, applications, pressure, and the time for the next look or report. A guest that
//! has enough memory and whose host wants no reports is not woken by it at all.

mod applications;
mod host;
mod link;
mod pending;
mod port;
mod socket;
#[cfg(test)]
mod tests;
mod turn;

use std::convert::Infallible;
use std::fs;
use std::io;
use std::path::PathBuf;

use rustix::mm::{MlockAllFlags, mlockall};

use crate::asking::SOCKET;
use crate::figures::Online;
use turn::Agent;

/// Whom the kernel kills last when memory runs out, but for those that it must not: who can get more should live.
const OOM_SCORE_ADJ: &str = "-900";

/// What an agent is started with.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the host is: a character device, or a unix socket; `None` for the port [`crate::message::PORT`], wherever it is.
    pub port: Option<PathBuf>,
    /// Where applications ask.
    pub socket: PathBuf,
    /// A group, by name or number, whose members may ask; root always may.
    pub socket_group: Option<String>,
    /// As what memory that was added is brought online.
    pub online: Online,
    /// The root directory of the kernel's files: `/` but in tests.
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

/// Is the agent of this guest. It waits for the port and for the host if they are not there, and again when they go away.
///
/// # Errors
/// If it cannot start: another one runs, or the socket for applications cannot be made.
pub fn run(options: Options) -> io::Result<Infallible> {
    // Neither is worth not to run for: a user other than root may try it out.
    if let Err(error) = mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE) {
        eprintln!(
            "aquifer-guest: its memory is not locked ({error}): near out-of-memory it may be slow"
        );
    }
    if let Err(error) = fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJ) {
        eprintln!("aquifer-guest: it may be killed when memory runs out: {error}");
    }
    let mut agent = Agent::start(options)?;
    loop {
        agent.turn()?;
    }
}
