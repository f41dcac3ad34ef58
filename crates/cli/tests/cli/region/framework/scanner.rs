//! A scanner of a group, for tests.

use std::time::Duration;

use aquifer_hosts::Daemon;
use aquifer_hosts::daemon::SCANNER;
use rustix::process::Signal;
use serde_json::Value;

use super::Setting;
use crate::common::binary;

/// A running scanner with its reports; its drop kills it.
pub struct Scanner(Daemon);

impl Scanner {
    pub fn start(setting: &Setting, group: &str, groups: &str) -> Self {
        let words = [group, "--groups", groups, "--scan", "400", "--report", "1ms"];
        let mut command = binary().json(setting.dir.path(), SCANNER);
        Self(Daemon::start(command.args(words)).unwrap())
    }

    #[track_caller]
    pub fn until(&mut self, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        self.0.until(what, Duration::from_secs(180), is).unwrap()
    }

    pub fn end(mut self, signal: Signal) {
        let status = self.0.end(signal).unwrap();
        assert!(signal == Signal::KILL || status.success(), "{status}");
    }
}
