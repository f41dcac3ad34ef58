//! This machine as a host of VMs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use aquifer_hosts::Export;
use aquifer_hosts::daemon::answer;
use aquifer_page::Bytes;
use aquifer_testbed::{Guest, Parts, Spec};
use rustix::process::Signal;
use serde_json::Value;

use super::{binary, lend, pages_of};

/// A lender on this machine, and a directory for VMs; dropping it removes both.
pub struct Here {
    /// Directory with the files of the lender and the VMs.
    pub dir: tempfile::TempDir,
    lender: Export,
    pub parts: Parts,
}

impl Here {
    /// Starts a lender with `lends` of memory, for guests that boot from `spec`.
    pub fn new(spec: Spec, lends: Bytes) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let parts = spec.parts(dir.path())?;
        let names = ["--name", "one", "--name", "two", "--name", "three"];
        let lender =
            lend(dir.path(), dir.path(), &[&[lends.0.to_string().as_str()], &names[..]].concat())?;
        Ok(Self { dir, lender, parts })
    }

    /// Runs `aquifer`; returns its answer.
    pub fn done(&self, words: &[&str]) -> Result<Value> {
        Ok(answer(&mut binary().json(self.dir.path(), words))?)
    }

    /// Returns the lender's URI.
    pub fn lender(&self) -> String {
        self.lender_of("one")
    }

    /// Returns the URI of the lender's memory for this VM: one, two or three.
    pub fn lender_of(&self, name: &str) -> String {
        format!("nbd+unix:///{name}?socket={}", self.dir.path().join("lender").display())
    }

    /// Starts a guest with these memory arguments of `aquifer vm start`, and with these disks.
    pub fn start(&self, name: &str, memory: &[&str], disks: &[PathBuf]) -> Result<Guest> {
        let text = |path: &Path| path.to_str().context("the path is not UTF-8").map(str::to_owned);
        let (kernel, initrd) = (text(&self.parts.kernel)?, text(&self.parts.initrd)?);
        let mut words = vec!["vm", "start", name];
        words.extend(memory);
        words.extend(["--accel", "tcg", "--kernel", &kernel, "--initrd", &initrd]);
        words.extend(["--append", &self.parts.append, "--"]);
        // For direct I/O, which must not reach memory that may be evicted.
        let disks = disks
            .iter()
            .map(|disk| Ok(format!("if=virtio,format=raw,cache=none,file={}", text(disk)?)));
        let disks = disks.collect::<Result<Vec<_>>>()?;
        words.extend(disks.iter().flat_map(|disk| ["-drive", disk]));
        let line = self.dir.path().join(format!("{name}-line"));
        let way = self.parts.arguments(&line);
        words.extend(way.iter().map(String::as_str));
        let status = self.done(&words)?;
        let serial = status["serial"].as_str().context("the VM has no serial port")?;
        Guest::connect(name, &line, Path::new(serial))
    }

    /// Tells whether a region is still mounted.
    pub fn has_mounts(&self) -> Result<bool> {
        Ok(fs::read_to_string("/proc/self/mounts")?
            .contains(self.dir.path().to_str().context("the path is not UTF-8")?))
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        if std::thread::panicking() || self.has_mounts().unwrap_or(false) {
            let logs = "cd $0; tail -n 20 vms/*/log regions/.*/log";
            let _ = Command::new("sh").args(["-c", logs]).arg(self.dir.path()).status();
        }
        for vm in self.done(&["vm", "list"]).ok().iter().filter_map(Value::as_array).flatten() {
            let _ = self.done(&["vm", "stop", "--force", vm["name"].as_str().unwrap_or_default()]);
        }
        let _ = self.lender.end(Signal::KILL);
        let _ = fs::remove_dir_all(pages_of(self.dir.path()));
    }
}
