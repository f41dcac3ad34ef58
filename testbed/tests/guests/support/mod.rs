//! Support for tests of Aquifer in guests.

mod built;
mod cluster;
mod here;
mod load;
mod picture;
mod vm_host;

use std::fs;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use aquifer_hosts::daemon::answer;
use aquifer_hosts::{Binary, Export};
use aquifer_testbed::Kernel;
use serde_json::Value;

pub use built::{aquifer, example, test, tool, with_script};
pub use cluster::{Aquifer, Cluster, member, with_admitted};
pub use here::Here;
pub use load::Load;
pub use vm_host::{Sizes, VmHost, busy_guest, busy_vm, ended, kill, process_like};

/// Timeout of an event that must happen, on emulated hosts of a busy machine; only a hang takes so
/// long.
pub const TIMEOUT: Duration = Duration::from_secs(600);

/// The modules of soft-RoCE, in load order.
pub const SOFT_ROCE: [&str; 3] = ["crc32-pclmul", "crc32_generic", "rdma_rxe"];

/// Returns the directory for a lender's pages, with the lender's other files in `dir`. The
/// directory is below root's stores, from which the kernel swaps nothing out while the lender is
/// dead.
pub fn pages_of(dir: &Path) -> PathBuf {
    Path::new("/dev/shm/aquifer")
        .join(format!("vm-{}", dir.file_name().unwrap_or_default().display()))
}

/// Returns the program `aquifer` of this machine.
pub fn binary() -> Binary {
    Binary::new(aquifer())
}

/// Returns the shell command of a daemon in a guest, with `more` arguments.
pub fn daemon(words: &[&str], more: &str) -> String {
    format!("exec aquifer {} {more}", words.join(" "))
}

/// Starts a lender that listens at `lender` in `dir`; its other files are in `run_dir`.
pub fn lend(run_dir: &Path, dir: &Path, words: &[&str]) -> Result<Export> {
    let mut command = Export::command(&binary(), run_dir);
    command.args(words).arg("--nbd").arg(format!("unix:{}", dir.join("lender").display()));
    Ok(Export::start(command.arg("--dir").arg(pages_of(dir)))?)
}

/// Runs a demo of guests, which must leave nothing but its picture; returns its figures.
pub fn demo(name: &str) -> Result<Value> {
    let dir = tempfile::tempdir()?;
    let picture = dir.path().join("picture.png");
    let mut demo = binary().json(dir.path(), &["demo", name, "--accel", "tcg", "--kernel"]);
    demo.arg(Kernel::V6_12.prepare()?.vmlinux()).arg("--picture").arg(&picture);
    let summary = answer(&mut demo)?;
    step(&format!("the demo: {summary}"));
    ensure!(fs::read(&picture)?.starts_with(b"\x89PNG"));
    fs::remove_file(&picture)?;
    let left = fs::read_dir(dir.path())?.count();
    ensure!(left == 0, "the demo left files in {}", dir.path().display());
    Ok(summary)
}

/// A step of a test: its name, and its function over the booted hosts.
pub type Step<T> = (&'static str, fn(&T) -> Result<()>);

/// Runs all steps of a test on hosts booted once, even after one fails; names the failed steps.
pub fn all_steps<T>(booted: &T, steps: &[Step<T>]) -> Result<()> {
    let mut failed = Vec::new();
    for (name, does) in steps {
        step(name);
        let ended = panic::catch_unwind(AssertUnwindSafe(|| does(booted)));
        match ended.unwrap_or_else(|_| Err(anyhow!("the step panicked"))) {
            Ok(()) => eprintln!("ok: {name}"),
            Err(error) => {
                eprintln!("FAILED: {name}: {error:?}");
                failed.push(*name);
            }
        }
    }
    ensure!(failed.is_empty(), "failed: {}", failed.join("; "));
    Ok(())
}

/// Prints the next step and its time, which the test harness shows if the test fails.
pub fn step(what: &str) {
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    eprintln!("{:6.1} s  {what}", BEGAN.get_or_init(Instant::now).elapsed().as_secs_f64());
}
