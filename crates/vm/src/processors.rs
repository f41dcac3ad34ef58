//! The processors of a guest, and what executes their code.

use std::fmt;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::node::NodeChoice;

/// The engine that executes the guest's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// Hardware virtualization, by `/dev/kvm`.
    Kvm,
    /// QEMU's emulation.
    Tcg,
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        })
    }
}

/// SeaBIOS's last message if no device is bootable, and the longest wait for it.
const FIRMWARE_DONE: &str = "No bootable device";
const FIRMWARE: Duration = Duration::from_secs(5);

/// KVM is rejected if it is slower than emulation by this factor: a guest's kernel would hang for
/// minutes.
const OF_NO_USE: u32 = 3;

impl Accelerator {
    /// Chooses KVM if this QEMU runs a machine of this type well under it, else emulation.
    ///
    /// On some hosts, virtual ones above all, guests crawl in spite of `/dev/kvm`. So this function
    /// runs the machine's firmware under both. A usable KVM takes at most about as long as
    /// emulation; an unusable one takes fifteen times as long.
    pub fn find(qemu: &Path, machine: &str) -> Self {
        let emulated = Self::Tcg.firmware_time(qemu, machine, FIRMWARE).unwrap_or(FIRMWARE);
        let bound = FIRMWARE.min(emulated * OF_NO_USE);
        if Self::Kvm.firmware_time(qemu, machine, bound).is_some() { Self::Kvm } else { Self::Tcg }
    }

    /// Measures the time until the machine's firmware finds no bootable device; `None` if that
    /// takes longer than `bound`.
    fn firmware_time(self, qemu: &Path, machine: &str, bound: Duration) -> Option<Duration> {
        let mut probe = Command::new(qemu);
        probe.args([
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-machine",
            machine,
            "-m",
            "64",
        ]);
        probe.args(self.arguments());
        // SeaBIOS prints its messages to this port.
        probe.args([
            "-chardev",
            "stdio,id=said",
            "-device",
            "isa-debugcon,iobase=0x402,chardev=said",
        ]);
        probe.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let started = Instant::now();
        let mut probe = probe.spawn().ok()?;
        let said = probe.stdout.take();
        let (tell, told) = mpsc::channel();
        let reading = thread::spawn(move || {
            let lines = said.map(|said| BufReader::new(said).lines().map_while(Result::ok));
            let done = lines.into_iter().flatten().find(|line| line.contains(FIRMWARE_DONE));
            // After the timeout no thread receives this.
            let _ = tell.send(done.map(|_| started.elapsed()));
        });
        let took = told.recv_timeout(bound).ok().flatten();
        let _ = probe.kill();
        let _ = probe.wait();
        let _ = reading.join();
        took
    }

    /// Returns QEMU's arguments for this accelerator, and for a processor with all of its features.
    pub fn arguments(self) -> [&'static str; 4] {
        ["-accel", self.option(), "-cpu", self.cpu()]
    }

    fn option(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg,thread=multi",
        }
    }

    /// Returns the default of `-cpu`. An emulated processor hides fast `rep movsb` (ERMS, FSRM):
    /// QEMU emulates that byte by byte, so that kernels copy files four times slower.
    fn cpu(self) -> &'static str {
        match self {
            Self::Kvm => "host",
            Self::Tcg => "max,-erms,-fsrm",
        }
    }

    /// Returns the processor model that stands for all features of the host.
    fn whole_cpu(self) -> &'static str {
        match self {
            Self::Kvm => "host",
            Self::Tcg => "max",
        }
    }
}

/// The processors of a guest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Processors {
    /// Number of vCPUs.
    pub cpus: u32,
    /// NUMA node of the host.
    #[serde(default, skip_serializing_if = "NodeChoice::is_auto")]
    pub node: NodeChoice,
    /// Accelerator.
    pub accelerator: Accelerator,
    /// The processor model, as QEMU's `-cpu` takes it; the host must offer all of its features.
    /// Without a model the guest sees all features of the host, and can move only to a host that
    /// has them too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
}

impl Processors {
    /// Returns the processor model that stands for all features of the host, if the VM uses that
    /// model.
    pub(crate) fn whole_cpu(&self) -> Option<&'static str> {
        self.cpu.is_none().then(|| self.accelerator.whole_cpu())
    }

    /// Adds these processors to QEMU's command line.
    pub(crate) fn add_to(&self, qemu: &mut Command) {
        qemu.args(["-accel", self.accelerator.option()]);
        // With `enforce`, QEMU refuses to start if the host lacks a feature of the model.
        let cpu = self.cpu.as_ref().map(|model| format!("{model},enforce"));
        qemu.args(["-cpu", cpu.as_deref().unwrap_or(self.accelerator.cpu())]);
        qemu.args(["-smp", &self.cpus.to_string()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_qemu_that_cannot_start_leaves_emulation() {
        assert_eq!(Accelerator::find(Path::new("/no/qemu"), "q35"), Accelerator::Tcg);
        assert_eq!(Accelerator::find(Path::new("/bin/false"), "q35"), Accelerator::Tcg);
    }
}
