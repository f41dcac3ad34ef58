//! A powered-on host: a QEMU process.

use std::fs::File;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use aquifer_page::Bytes;
use aquifer_vm::Accelerator;

use crate::console::Console;
use crate::kernel::Prepared;
use crate::line::Line;
use crate::wire::PORT;
use crate::{spawner, sys, tsc};

/// Command line of the kernel, with a root file system (ramfs) that the kernel cannot swap out. The
/// kernel does without CMPXCHG16B: after it, QEMU 7.2 (TCG) gave an interrupt wrong flags, mostly
/// when the instruction had waited for a page, and the kernel failed with a double fault.
pub(crate) const KERNEL_LINE: &str = "console=ttyS0 quiet panic=-1 nokaslr clearcpuid=cx16 \
                           mitigations=off audit=0 rootfstype=ramfs \
                           sysrq_always_enabled cryptomgr.notests random.trust_cpu=on";

/// A feature that the testbed's emulated processors lack: QEMU computes CRC-32C, an instruction of
/// SSE 4.2, bit by bit, slower than programs do without it.
const NO_SSE4_2: &str = ",-sse4.2";

/// Returns the kernel arguments that emulation adds to [`KERNEL_LINE`]. Emulated processors are too
/// slow for the kernel's checks of its timers, and cannot measure their counter.
pub(crate) fn emulated() -> String {
    format!(" tsc=reliable tsc_early_khz={} no_timer_check", tsc::khz())
}

/// A machine to power on.
#[derive(Debug)]
pub(crate) struct Machine<'a> {
    pub(crate) kernel: &'a Prepared,
    pub(crate) image: &'a File,
    pub(crate) memory: Bytes,
    pub(crate) cpus: u32,
    /// Size of the disk; zero means no disk.
    pub(crate) disk: Bytes,
    pub(crate) accelerator: Accelerator,
    /// The network's socket and the MAC address; `None` means no network.
    pub(crate) network: Option<(UnixDatagram, String)>,
}

/// A running machine. Dropping the machine pulls the plug.
#[derive(Debug)]
pub(crate) struct Power {
    qemu: Child,
    pub(crate) line: Arc<Line>,
}

impl Machine<'_> {
    /// Starts QEMU. Apart from the kernel, QEMU opens no named file, and reaches only the
    /// descriptors that it inherits.
    ///
    /// # Errors
    /// If a socket or the disk cannot be made, or QEMU cannot start.
    pub(crate) fn power_on(self, console: &Arc<Console>) -> Result<Power> {
        let (screen, serial) = UnixStream::pair()?;
        let (line, port) = UnixStream::pair()?;
        let (complaints, stderr) = UnixStream::pair()?;
        let image = self.image.try_clone()?;
        let mut line_to_kernel = KERNEL_LINE.to_owned();
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args([
            "-M",
            "q35",
            "-nodefaults",
            "-no-user-config",
            "-no-reboot",
            "-display",
            "none",
        ]);
        let [arguments @ .., cpu] = self.accelerator.arguments();
        let mut cpu = cpu.to_owned();
        if self.accelerator == Accelerator::Tcg {
            line_to_kernel += &emulated();
            cpu += NO_SSE4_2;
        }
        qemu.args(arguments).arg(cpu);
        qemu.args(["-smp", &self.cpus.to_string(), "-m", &format!("{}M", self.memory.0 >> 20)]);
        qemu.arg("-kernel").arg(self.kernel.vmlinux()).args(["-append", &line_to_kernel]);
        qemu.args(["-initrd", &format!("/proc/self/fd/{}", image.as_raw_fd())]);
        // The multiplexer provides the escape sequences that `Console::ask` types.
        qemu.args(["-chardev", &format!("socket,id=console,mux=on,fd={}", serial.as_raw_fd())]);
        qemu.args(["-serial", "chardev:console", "-device", "virtio-serial-pci"]);
        qemu.args(["-chardev", &format!("socket,id=line,fd={}", port.as_raw_fd())]);
        qemu.args(["-device", &format!("virtserialport,chardev=line,name={PORT}")]);
        let mut handed_down: Vec<OwnedFd> = vec![serial.into(), port.into(), image.into()];
        if let Some((wire, mac)) = self.network {
            let wire = OwnedFd::from(wire);
            qemu.args([
                "-netdev",
                &format!("dgram,id=net,local.type=fd,local.str={}", wire.as_raw_fd()),
            ]);
            qemu.args(["-device", &format!("virtio-net-pci,netdev=net,mac={mac},romfile=")]);
            handed_down.push(wire);
        }
        if self.disk > Bytes::ZERO {
            let disk = tempfile::tempfile_in(crate::cache_dir()?).context("cannot make a disk")?;
            disk.set_len(self.disk.0)?;
            let file = format!("/proc/self/fd/{}", disk.as_raw_fd());
            qemu.args(["-drive", &format!("file={file},format=raw,cache=none,if=virtio")]);
            handed_down.push(disk.into());
        }
        // A process group of its own: ctrl-C is for the testbed's user.
        qemu.stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(OwnedFd::from(stderr))
            .process_group(0);
        sys::bind(&mut qemu, handed_down);
        let started = spawner::spawn(qemu);
        let qemu = started
            .context("cannot run qemu-system-x86_64: scripts/install-packages test installs it")?;
        console.connect(screen.try_clone()?);
        console.show(screen);
        console.show(complaints);
        Ok(Power { qemu, line: Line::open(line)? })
    }
}

impl Power {
    /// Kills QEMU, as if the plug were pulled, and waits for its end.
    pub(crate) fn pull(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }

    /// Returns QEMU's exit status if QEMU has ended.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.qemu.try_wait().ok().flatten()
    }
}

impl Drop for Power {
    fn drop(&mut self) {
        self.pull();
    }
}
