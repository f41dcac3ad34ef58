//! The stage of the demo: two hosts, a lender, and the guest's initramfs.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aquifer_cli::failure::{OrFail, Result};
use aquifer_cli::init::{Cluster, Member};
use aquifer_cli::instance::Instance;
use aquifer_page::Bytes;
use aquifer_vm::process::{Files, client};
use aquifer_vm::{Accelerator, Initrd};

use super::host::Host;
use crate::netns::Network;
use crate::process::{self, Process, Site};
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
    _lender: Process,
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
        let network = Network::create(instance)?;
        let mut stage = Self { hosts: Vec::new(), network, dir, _lender: lender };
        let names = ["a", "b"];
        let spaces = stage.network.hosts();
        let members: Vec<_> = names
            .iter()
            .zip(spaces)
            .map(|(name, space)| {
                Member::new(
                    &name.parse().or_fail(|| "naming a host")?,
                    &space.address().to_string(),
                )
            })
            .collect::<Result<_>>()?;
        Cluster { dir: stage.dir.join("cluster"), name: "demo".to_owned() }
            .make(&members, false)?;
        for (index, name) in names.into_iter().enumerate() {
            let [own, other] = [index, 1 - index].map(|index| &stage.network.hosts()[index]);
            let peer = (names[1 - index], other.address());
            let site = Site { name, dir: &stage.dir, namespace: own, peer };
            stage.hosts.push(Host::start(name, &site, qemu)?);
        }
        for (host, space) in stage.hosts.iter_mut().zip(stage.network.hosts()) {
            host.wait_until_ready(space, wait)?;
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
        ["a", "b"].map(|host| self.dir.join(host).join("vms").join(vm).join("serial"))
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

fn clear_vms(dir: &Path) {
    for host in ["a", "b"] {
        let files: Vec<Files> = client::list(&dir.join(host)).unwrap_or_default();
        for vm in files {
            let _ = client::stop(&vm, true, CLEARING);
        }
    }
}

/// Removes the remains of a killed demo; its agents, its lender and the other QEMUs ended with it.
pub(super) fn clean_up(dir: &Path, dead: &Instance) -> Result<()> {
    clear_vms(dir);
    Network::clean_up(dead)?;
    remove(dir);
    Ok(())
}
