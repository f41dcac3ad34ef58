//! Swapoff in a separate process.
//!
//! If memory runs out while swapoff reads pages back, the kernel kills the calling process first,
//! whatever its `oom_score_adj`. The process that serves the pages must therefore not call swapoff.

use std::env;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use aquifer_control_socket::first_word::say;
use serde::{Deserialize, Serialize};

use super::run::Task;
use crate::safety;
use crate::swap::{self, Progress, SwapError};

/// A report of the helper, one JSON object per line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum SwapOffReport {
    Progress(Progress),
    Done,
    Failed { errno: Option<i32>, error: String },
}

/// Returns a command that runs this program again with the same arguments, and so [`super::run()`].
pub(super) fn this_program() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.args(env::args_os().skip(1));
    command
}

/// Turns off swap on `device` through `program`, which must call [`super::run()`].
pub(super) fn by_helper(
    mut program: Command,
    device: &Path,
    mut progress: impl FnMut(Progress),
) -> Result<(), SwapError> {
    let used = swap::check_room(device)?;
    let fail = |source| SwapError::Off {
        device: device.to_owned(),
        source,
        help: "the helper process for swapoff failed",
    };
    let task = serde_json::to_string(&Task::SwapOff { device: device.to_owned() })
        .map_err(|e| fail(e.into()))?;
    let mut helper = program.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(fail)?;
    if let Some(mut input) = helper.stdin.take() {
        writeln!(input, "{task}").map_err(fail)?;
    }
    let mut result = None;
    for line in helper.stdout.take().into_iter().flat_map(|output| BufReader::new(output).lines()) {
        match serde_json::from_str(&line.map_err(fail)?) {
            Ok(SwapOffReport::Progress(now)) => progress(now),
            Ok(SwapOffReport::Done) => result = Some(Ok(())),
            Ok(SwapOffReport::Failed { errno, error }) => {
                let source =
                    errno.map_or_else(|| io::Error::other(error), io::Error::from_raw_os_error);
                result = Some(Err(swap::off_error(device, used, source)));
            }
            Err(error) => return Err(fail(error.into())),
        }
    }
    let _ = helper.wait();
    // Without a final report the helper was killed, as the kernel does when memory runs out.
    result.unwrap_or_else(|| Err(SwapError::NoRoom { device: device.to_owned(), used }))
}

/// Runs swapoff in the helper process and reports on standard output.
pub(super) fn helper(device: &Path) -> io::Result<()> {
    // If this fails, the process lacks the privilege and so never had the protection.
    let _ = safety::renounce();
    let result = swap::off(device, |progress| {
        // If the reader is gone, swapoff continues.
        let _ = say(&SwapOffReport::Progress(progress));
    });
    say(&match result {
        Ok(()) => SwapOffReport::Done,
        Err(error) => SwapOffReport::Failed { errno: error.errno(), error: error.to_string() },
    })
}
