//! The stage of the demo: two hosts, a lender, and the guest's initramfs.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aquifer_cli::failure::{Failure, OrFail, Result};
use aquifer_cli::instance::Instance;
use aquifer_hosts::daemon::answer;
use aquifer_hosts::{Export, Host, Network};
use aquifer_page::Bytes;
use aquifer_vm::process::{Files, client};
use aquifer_vm::{Accelerator, Initrd};
use serde::de::DeserializeOwned;

use crate::process::{self, failure};
use crate::program;
use crate::remove;
use crate::wait::Wait;

/// How long the removal of a VM may take.
const CLEARING: Duration = Duration::from_secs(20);

/// The boot parameters of a guest.
#[derive(Debug)]
pub(super) struct Boot {
    pub(super) qemu: PathBuf,
    pub(super) memory: Bytes,
    pub(super) kernel: PathBuf,
    pub(super) initrd: PathBuf,
    pub(super) append: String,
    pub(super) accelerator: Accelerator,
}

/// The hosts with their network, files and lender; its drop removes all of it.
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) hosts: Vec<Host>,
    pub(super) network: Network,
    pub(super) dir: PathBuf,
    _lender: Export,
}

impl Stage {
    pub(super) fn set(
        dir: PathBuf,
        instance: &Instance,
        memory: Bytes,
        qemu: &Path,
        wait: Wait<'_>,
    ) -> Result<Self> {
        fs::create_dir_all(&dir).or_fail(|| format!("making {}", dir.display()))?;
        let lender = process::lender(&dir, memory)?;
        let network = Network::create(instance.name()).map_err(failure)?;
        let mut stage = Self { hosts: Vec::new(), network, dir, _lender: lender };
        stage.hosts = process::hosts(&stage.network, &stage.dir)?;
        // The agents take VMs in, and neither lend nor borrow.
        let sections = format!(
            "[vms]\naccept = true\nqemu = \"{}\"\n\
             [lend]\nenabled = false\n[borrow]\nenabled = false",
            qemu.display()
        );
        for host in &stage.hosts {
            host.set(&sections).map_err(failure)?;
            host.start(process::end_with_this).map_err(failure)?;
        }
        for host in &stage.hosts {
            process::wait_until_ready(host, wait)?;
        }
        Ok(stage)
    }

    /// Makes the guest's initramfs, with this program as the first process.
    pub(super) fn initrd(&self) -> Result<PathBuf> {
        let what = || "making the guest's first file system";
        let mut initrd = Initrd::default();
        initrd.copy(&program::this()?, "/init").or_fail(what)?;
        let path = self.dir.join("initrd");
        fs::write(&path, initrd.finish()).or_fail(what)?;
        Ok(path)
    }

    /// Returns the serial ports of a VM on both hosts.
    pub(super) fn serials(&self, vm: &str) -> [PathBuf; 2] {
        ["a", "b"].map(|host| state(&self.dir, host).join("vms").join(vm).join("serial"))
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        clear_vms(&self.dir);
        self.hosts.clear();
        // A drop cannot report. The next demo removes the rest.
        remove(&self.dir);
    }
}

/// Runs `aquifer` on a host and returns the answer.
pub(super) fn ask<T: DeserializeOwned>(host: &Host, words: &[&str]) -> Result<T> {
    let what = || format!("'aquifer {}' on host {}", words[..3].join(" "), host.name());
    let mut command = host.command().map_err(failure)?;
    answer(command.arg("--json").args(words)).map_err(|error| Failure::new(what(), error.why))
}

/// Returns the directory of the files of a host's VMs.
fn state(dir: &Path, host: &str) -> PathBuf {
    dir.join(host).join("state")
}

fn clear_vms(dir: &Path) {
    for host in ["a", "b"] {
        let files: Vec<Files> = client::list(&state(dir, host)).unwrap_or_default();
        for vm in files {
            let _ = client::stop(&vm, true, CLEARING);
        }
    }
}

/// Removes the remains of a killed demo; its agents, its lender and the other QEMUs ended with it.
pub(super) fn clean_up(dir: &Path, dead: &Instance) -> Result<()> {
    clear_vms(dir);
    Network::clean_up(dead.name()).map_err(failure)?;
    remove(dir);
    Ok(())
}
