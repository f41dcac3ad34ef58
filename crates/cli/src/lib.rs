//! What the binary `aquifer` is made of; `main.rs` only calls [`main`].
//!
//! One file a command in [`commands`]. What commands share lies beside them: how they fail ([`failure`]), how they answer
//! ([`output`]), their manual ([`manual`]), memory cgroups ([`cgroup`]), the pieces of `aquifer demo` ([`demo`]).

use std::process::ExitCode;

pub mod agent_call;
pub mod cgroup;
pub mod commands;
pub mod demo;
pub mod doctor;
pub mod failure;
pub mod init;
pub mod instance;
pub mod lender;
pub mod lender_uri;
pub mod listening;
pub mod manual;
pub mod output;
pub mod progress;
pub mod run;
mod sys;
pub mod view;
pub mod volumes;

/// Reads the command line, runs the command it names and returns its exit code: 0 done, 1 failed, 2 misuse.
pub fn main() -> ExitCode {
    let cli = match commands::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let json = cli.common.json;
    match cli.run() {
        Ok(code) => code,
        Err(failure) => {
            failure.report(json);
            ExitCode::FAILURE
        }
    }
}
