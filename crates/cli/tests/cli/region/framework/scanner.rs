//! A scanner of a group, for tests.

use std::io::{BufRead as _, BufReader, Lines};
use std::process::{Child, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::Setting;
use crate::common::aquifer;

/// A running scanner with its reports; its drop kills it.
pub struct Scanner {
    child: Child,
    reports: Lines<BufReader<ChildStdout>>,
}

impl Scanner {
    pub fn start(setting: &Setting, group: &str, groups: &str) -> Self {
        let words = [
            "--json", "serve", "dedup", group, "--groups", groups, "--scan", "400", "--report",
            "1ms",
        ];
        let mut child =
            aquifer(setting.dir.path()).args(words).stdout(Stdio::piped()).spawn().unwrap();
        let reports = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, reports }
    }

    #[track_caller]
    pub fn until(&mut self, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + Duration::from_secs(180);
        loop {
            let line = self.reports.next().expect("the scanner ended early").unwrap();
            let report: Value = serde_json::from_str(&line).unwrap();
            if is(&report) {
                return report;
            }
            assert!(Instant::now() < deadline, "timed out waiting for: {what}: {report}");
        }
    }

    pub fn end(mut self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
        let status = self.child.wait().unwrap();
        assert!(signal == Signal::KILL || status.success(), "{status}");
    }
}

impl Drop for Scanner {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
