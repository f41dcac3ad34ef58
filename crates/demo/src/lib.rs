//! The content of the binary `aquifer-demo`; `main.rs` only calls [`main`].
//!
//! The demos show real processes with checked content, hosts in network namespaces, and guests.
//! The hosts run the `aquifer` that lies beside `aquifer-demo`.

pub mod churn;
mod cluster;
mod command;
mod groups;
mod guest;
mod live;
mod loader;
mod machine;
mod migrate;
mod panel;
pub mod picture;
mod process;
mod program;
mod region;
mod resize;
mod session;
mod sharing;
mod user;
mod wait;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use aquifer_cli::{logging, panics};

use command::Demo;
use command::worker::Worker;
use guest::run as be_a_guest;
use session::Outcome;

/// Reads the command line, runs its demo and returns the exit code: 0 done, 1 failed, 2 misuse.
pub fn main() -> ExitCode {
    panics::end_the_process();
    let line: Vec<_> = std::env::args_os().collect();
    let (ended, json) = match Worker::of(&line) {
        Ok(Some(worker)) => (worker.run(), false),
        Ok(None) => match Demo::parse(line) {
            Ok(demo) => {
                let json = demo.common.json;
                (logging::check().and_then(|()| demo.run()), json)
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

/// Returns the directory, in RAM, of the pages that the demo with files in `dir` lends.
fn stores(dir: &Path) -> PathBuf {
    Path::new("/dev/shm/aquifer").join(dir.file_name().unwrap_or_default())
}

/// Removes the files of a demo, and the pages that its hosts and lenders have in RAM. Ignores
/// failures: either directory may be missing.
fn remove(dir: &Path) {
    let _ = fs::remove_dir_all(stores(dir));
    let _ = fs::remove_dir_all(dir);
}
