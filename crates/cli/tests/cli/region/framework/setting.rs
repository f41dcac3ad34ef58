//! The setting of a test's regions.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread::sleep;
use std::time::Duration;

use serde_json::Value;

use super::program::{MEMORY_PROGRAM, lives};
use super::{Program, lacks_regions};
use crate::common::{Export, aquifer, done, serve, wait_until};

/// A lender, and a directory of regions; its drop removes all regions.
pub struct Setting {
    pub dir: tempfile::TempDir,
    pub lender: Export,
}

impl Setting {
    /// Makes the setting; `None` if this test cannot run here.
    pub fn new() -> Option<Self> {
        if lacks_regions() {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let socket = format!("unix:{}", dir.path().join("lender").display());
        let lender = serve(dir.path(), &["128M", "--nbd", &socket]);
        Some(Self { dir, lender })
    }

    pub fn aquifer(&self, words: &[&str]) -> Output {
        aquifer(self.dir.path()).args(words).output().unwrap()
    }

    /// Runs a command that must succeed; returns its answer.
    pub fn done(&self, words: &[&str]) -> Value {
        done(self.dir.path(), words)
    }

    /// Starts a second lender: an export serves one region only.
    pub fn another_lender(&self) -> Export {
        let socket = format!("unix:{}", self.dir.path().join("another").display());
        serve(self.dir.path(), &["128M", "--nbd", &socket])
    }

    pub fn create(&self, name: &str, more: &[&str]) -> PathBuf {
        self.create_over(&self.lender, name, more)
    }

    pub fn create_over(&self, lender: &Export, name: &str, more: &[&str]) -> PathBuf {
        let words =
            ["region", "create", name, "--size", "32M", "--cache", "8M", "--lender", lender.uri()];
        let created = self.done(&[&words, more].concat());
        PathBuf::from(created["file"].as_str().unwrap())
    }

    pub fn show(&self, name: &str) -> Value {
        self.done(&["region", "show", name])
    }

    pub fn start(&self, region: &Path) -> Program {
        let disk = self.dir.path().join("disk");
        let (region, disk) = (region.to_str().unwrap(), disk.to_str().unwrap());
        let words = ["--", "python3", "-c", MEMORY_PROGRAM, region, disk];
        self.exec(&words)
    }

    pub fn exec(&self, words: &[&str]) -> Program {
        Program::start(aquifer(self.dir.path()).args(["region", "exec"]).args(words))
    }

    /// Starts the program in C that maps a region by the library and obeys commands.
    pub fn lives(&self, region: &Path, more: &[&str]) -> Program {
        Program::start(Command::new(lives(self.dir.path())).arg(region).args(more))
    }

    pub fn mounts(&self) -> usize {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        mounts.lines().filter(|line| line.contains(self.dir.path().to_str().unwrap())).count()
    }

    /// Removes all regions that are left; returns false if one cannot be removed.
    fn removes_all(&self) -> bool {
        let list = self.aquifer(&["--json", "region", "list"]);
        let list: Value = serde_json::from_slice(&list.stdout).unwrap_or_default();
        let mut regions = list.as_array().into_iter().flatten();
        let removed =
            |region: &Value| self.aquifer(&["region", "rm", region["name"].as_str().unwrap()]);
        regions.all(|region| removed(region).status.success()) && self.mounts() == 0
    }

    pub fn remove(&self, name: &str) {
        wait_until("no program maps the region", || {
            self.show(name)["programs"].as_array().unwrap().is_empty()
        });
        self.done(&["region", "rm", name]);
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        // The engine notices the end of a program after a moment.
        let removed = (0..500).any(|_| {
            self.removes_all() || {
                sleep(Duration::from_millis(20));
                false
            }
        });
        assert!(
            removed || std::thread::panicking(),
            "regions are left over in {}",
            self.dir.path().display()
        );
    }
}
