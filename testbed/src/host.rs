//! A host: one guest, its place on the switch, and what can be done to it.

use std::fmt;
use std::fs::File;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use aquifer_guest::Accelerator;

use crate::console::Console;
use crate::kernel::Prepared;
use crate::process::Process;
use crate::qemu::{Machine, Power};
use crate::shell::Shell;
use crate::spec::Spec;
use crate::switch::Switch;

/// How long a boot may take: for hangs, on a machine that has other things to do.
const PATIENCE: Duration = Duration::from_secs(120);

/// How often a host may be powered on until it is up.
const BOOTS: usize = 3;

/// A host of a [`crate::Testbed`].
#[derive(Debug)]
pub struct Host {
    spec: Spec,
    kernel: Prepared,
    image: Arc<File>,
    accelerator: Accelerator,
    switch: Arc<Switch>,
    port: usize,
    /// What the host is told of the others at each boot: a shell script.
    greeting: String,
    console: Arc<Console>,
    power: Mutex<Option<Power>>,
}

/// What a host stands on.
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
            "set -e\nhostname {name}\nmkdir -p /etc\nprintf '%s\\n' '{hosts}' >/etc/hosts\nip link set lo up\n\
             ip addr add {address}/24 dev eth0\nip link set eth0 up\n\
             nc -w 1 127.0.0.1 1 </dev/null 2>/dev/null || true"
        );
        let console = Console::new(&spec.name, spec.live_console);
        Self { spec, kernel, image, accelerator, switch, port, greeting, console, power: Mutex::default() }
    }

    /// Its name, which the other hosts know.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Its address on the switch.
    pub fn address(&self) -> Ipv4Addr {
        address(self.port)
    }

    /// Cuts its link: no frame reaches it or leaves it; it is not told.
    pub fn cut(&self) {
        self.console.note("link cut");
        self.switch.set_link(self.port, false);
    }

    /// Mends its link.
    pub fn mend(&self) {
        self.console.note("link mended");
        self.switch.set_link(self.port, true);
    }

    /// Pulls its plug: nothing is left of it but what it has said on its console.
    ///
    /// # Errors
    /// If it is off.
    pub fn pull_plug(&self) -> Result<()> {
        let power = self.power().take();
        self.switch.unplug(self.port);
        self.console.note("plug pulled");
        // Ends with this.
        power.map(drop).with_context(|| format!("host {} is switched off already", self.name()))
    }

    /// Powers it on and waits until it runs commands, as after [`Self::pull_plug`].
    ///
    /// # Errors
    /// If it is on, or does not boot.
    pub fn boot(&self) -> Result<()> {
        self.power_on()?;
        self.wait_until_up()
    }

    /// All that it has said on its console, over all boots.
    pub fn console(&self) -> String {
        self.console.text()
    }

    /// Whether it is on, as far as QEMU tells.
    pub fn is_on(&self) -> bool {
        self.power().as_mut().is_some_and(|power| power.ended().is_none())
    }

    pub(crate) fn console_tail(&self) -> String {
        self.console.tail()
    }

    fn power(&self) -> MutexGuard<'_, Option<Power>> {
        self.power.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn power_on(&self) -> Result<()> {
        let mut power = self.power();
        if power.as_mut().is_some_and(|power| power.ended().is_none()) {
            bail!("host {} is on already", self.name());
        }
        let wire = self.switch.plug(self.port).context("cannot plug a host into the switch")?;
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

    /// A host that dies or hangs as it boots is powered on again, some times: now and then an emulated kernel dies of changing its own
    /// code while another processor runs it, and once in many hundreds of boots an emulated machine has stopped before its kernel
    /// said anything.
    pub(crate) fn wait_until_up(&self) -> Result<()> {
        let mut boots = 1;
        loop {
            let line = self.power().as_ref().map(|power| power.line.clone());
            let line = line.with_context(|| format!("host {} is switched off", self.name()))?;
            if line.wait_until_ready(PATIENCE) {
                return self.sh(&self.greeting).map(|_| ());
            }
            if !line.is_gone() {
                self.console.ask();
            }
            if boots == BOOTS {
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
        // Before QEMU goes, so that no frame waits for it.
        self.switch.unplug(self.port);
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The address of the host at a port.
pub(crate) fn address(port: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, u8::try_from(port + 1).unwrap_or(u8::MAX))
}
