//! Regions with their lender, programs that map them, and functions that kill their processes.

mod program;
mod scanner;
mod setting;

use std::fs;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::wait_until;
pub use program::{GUESSING_PROGRAM, HEAP_PROGRAM, MEMORY_PROGRAM, Program, compile};
pub use scanner::Scanner;
pub use setting::Setting;

pub fn lacks_regions() -> bool {
    let lacks = !rustix::process::geteuid().is_root();
    if lacks {
        eprintln!("skipped: needs root");
    }
    lacks
}

pub fn kill(pid: &Value) {
    kill_process(Pid::from_raw(pid.as_i64().unwrap() as i32).unwrap(), Signal::KILL).unwrap();
}

/// Kills the processes of a region: first the supervisor, which would start another engine.
pub fn kill_processes(setting: &Setting, name: &str) {
    let engine = setting.show(name)["pid"].clone();
    let stat = fs::read_to_string(format!("/proc/{engine}/stat")).unwrap();
    let supervisor =
        stat.rsplit(") ").next().unwrap().split(' ').nth(1).unwrap().parse::<i64>().unwrap();
    [Value::from(supervisor), engine].iter().for_each(kill);
    wait_until("no engine serves the region", || {
        !setting.aquifer(&["region", "show", name]).status.success()
    });
}
