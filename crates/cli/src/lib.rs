//! The content of the binary `aquifer`; `main.rs` only calls [`main`].
//!
//! Each command has a file in [`commands`]. The modules that commands share lie beside them:
//! failures ([`failure`]), answers ([`output`]), manuals ([`manual`]), memory cgroups ([`cgroup`])
//! and the process that needs memory in demos, tests and measurements ([`load`]).

use std::process::ExitCode;

pub mod agent_call;
pub mod cgroup;
mod claim;
pub mod commands;
pub mod doctor;
pub mod failure;
pub mod init;
pub mod instance;
pub mod io_timeout;
pub mod lender;
pub mod lender_uri;
pub mod lenders;
pub mod listening;
pub mod load;
pub mod logging;
pub mod manual;
pub mod output;
pub mod panics;
pub mod progress;
pub mod run;
pub mod sys;
pub mod table;
pub mod view;
pub mod volumes;

/// Reads the command line, runs its command and returns the exit code: 0 done, 1 failed, 2 misuse.
pub fn main() -> ExitCode {
    panics::end_the_process();
    let line: Vec<_> = std::env::args_os().collect();
    let worker = commands::worker::Worker::of(&line);
    // A worker that inherits a shell's variable completes nothing.
    if let Ok(None) = worker
        && let Some(code) = commands::complete(&line)
    {
        return code;
    }
    let (ended, json) = match worker {
        Ok(Some(worker)) => (worker.run(), false),
        Ok(None) => match commands::parse(line) {
            Ok(cli) => {
                let json = cli.common.json;
                (logging::check().and_then(|()| cli.run()), json)
            }
            Err(code) => return code,
        },
        Err(code) => return code,
    };
    ended.unwrap_or_else(|failure| {
        failure.report(json);
        ExitCode::FAILURE
    })
}
