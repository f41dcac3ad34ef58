//! A host: one guest and its port on the switch.

use std::fmt;
use std::fs::File;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use aquifer_page::lock;
use aquifer_vm::Accelerator;

use crate::console::Console;
use crate::kernel::Prepared;
use crate::process::Process;
use crate::qemu::{Machine, Power};
use crate::shell::Shell;
use crate::spec::Spec;
use crate::switch::Switch;

/// Timeout of a boot on a busy machine; only a hang takes so long.
const BOOT_TIMEOUT: Duration = Duration::from_secs(120);

/// How often the testbed powers a host on before it gives up.
const MAX_BOOTS: usize = 3;

/// A host of a [`crate::Testbed`].
#[derive(Debug)]
pub struct Host {
    spec: Spec,
    kernel: Prepared,
    image: Arc<File>,
    accelerator: Accelerator,
    switch: Arc<Switch>,
    port: usize,
    /// Shell script that sets up the host's name and network at each boot.
    greeting: String,
    console: Arc<Console>,
    power: Mutex<Option<Power>>,
}

/// The resources that a host needs.
pub(crate) struct Ground {
    pub(crate) kernel: Prepared,
    pub(crate) image: Arc<File>,
    pub(crate) accelerator: Accelerator,
    pub(crate) switch: Arc<Switch>,
    pub(crate) port: usize,
    /// The lines of `/etc/hosts`.
    pub(crate) hosts: String,
}

impl Host {
    pub(crate) fn new(spec: Spec, ground: Ground) -> Self {
        let Ground { kernel, image, accelerator, switch, port, hosts } = ground;
        let (name, address) = (&spec.name, address(port));
        // The first connection lets the kernel patch its own text. Where another processor ran that
        // text meanwhile, an emulated guest was seen to crash; now none does.
        let greeting = format!(
            "set -e\nhostname {name}\nmkdir -p /etc\n\
             printf '%s\\n' '{hosts}' >/etc/hosts\nip link set lo up\n\
             ip addr add {address}/24 dev eth0\nip link set eth0 up\n\
             nc -w 1 127.0.0.1 1 </dev/null 2>/dev/null || true"
        );
        let console = Console::new(&spec.name, spec.live_console);
        Self {
            spec,
            kernel,
            image,
            accelerator,
            switch,
            port,
            greeting,
            console,
            power: Mutex::default(),
        }
    }

    /// Returns the host's name, which the other hosts resolve.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Returns the host's address on the switch.
    pub fn address(&self) -> Ipv4Addr {
        address(self.port)
    }

    /// Cuts the host's link without notice to the guest: no frame reaches it or leaves it.
    pub fn cut(&self) {
        self.console.note("link cut");
        self.switch.set_link(self.port, false);
    }

    /// Mends the host's link.
    pub fn mend(&self) {
        self.console.note("link mended");
        self.switch.set_link(self.port, true);
    }

    /// Kills the host as if its plug were pulled; only its console text remains.
    ///
    /// # Errors
    /// If the host is off.
    pub fn pull_plug(&self) -> Result<()> {
        let power = self.power().take();
        self.switch.unplug(self.port);
        self.console.note("plug pulled");
        // Dropping the `Power` kills QEMU.
        power.map(drop).with_context(|| format!("host {} is switched off already", self.name()))
    }

    /// Powers the host on, for example after [`Self::pull_plug`], and waits until it runs commands.
    ///
    /// # Errors
    /// If the host is on, or does not boot.
    pub fn boot(&self) -> Result<()> {
        self.power_on()?;
        self.wait_until_up()
    }

    /// Returns the console text of all boots.
    pub fn console(&self) -> String {
        self.console.text()
    }

    /// Tells whether the host is on, which it is while QEMU runs.
    pub fn is_on(&self) -> bool {
        self.power().as_mut().is_some_and(|power| power.ended().is_none())
    }

    pub(crate) fn console_tail(&self) -> String {
        self.console.tail()
    }

    fn power(&self) -> MutexGuard<'_, Option<Power>> {
        lock(&self.power)
    }

    pub(crate) fn power_on(&self) -> Result<()> {
        let mut power = self.power();
        if power.as_mut().is_some_and(|power| power.ended().is_none()) {
            bail!("host {} is already switched on", self.name());
        }
        let wire = self.switch.plug(self.port).context("cannot connect the host to the switch")?;
        let machine = Machine {
            kernel: &self.kernel,
            image: &self.image,
            memory: self.spec.memory,
            cpus: self.spec.cpus,
            disk: self.spec.disk,
            accelerator: self.accelerator,
            network: Some((wire, Switch::mac(self.port))),
        };
        *power = Some(machine.power_on(&self.console)?);
        Ok(())
    }

    /// Waits until the host runs commands, then sets it up. A host that dies or hangs as it boots
    /// gets [`MAX_BOOTS`] attempts. An emulated kernel sometimes dies of changing code that another
    /// processor runs. Once in many hundreds of boots, an emulated machine stops before its kernel
    /// prints anything.
    pub(crate) fn wait_until_up(&self) -> Result<()> {
        let mut boots = 1;
        loop {
            let line = self.power().as_ref().map(|power| power.line.clone());
            let line = line.with_context(|| format!("host {} is switched off", self.name()))?;
            if line.wait_until_ready(BOOT_TIMEOUT) {
                return self.sh(&self.greeting).map(|_| ());
            }
            if !line.is_gone() {
                self.console.ask();
            }
            if boots == MAX_BOOTS {
                return Err(self.console.failure("does not boot"));
            }
            boots += 1;
            self.pull_plug()?;
            self.power_on()?;
        }
    }
}

impl Shell for Host {
    fn spawn(&self, command: &str) -> Result<Process> {
        match &*self.power() {
            Some(power) => Ok(Process::start(&power.line, &self.console, command)),
            None => bail!("host {} is switched off: boot it before '{command}'", self.name()),
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // Unplug before QEMU ends, so that no frame waits for it.
        self.switch.unplug(self.port);
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Returns the address of the host at a port.
pub(crate) fn address(port: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, u8::try_from(port + 1).unwrap_or(u8::MAX))
}
