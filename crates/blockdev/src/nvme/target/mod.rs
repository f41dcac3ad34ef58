//! Lease backend `kernel`: RAM of this host, lent by the kernel's NVMe target over TCP and RDMA.
//!
//! A [`Target`] is a RAM disk (zram, or else brd) as the one namespace of an nvmet subsystem, with
//! ports through which hosts reach it. All of it is made through configfs and outlives the process
//! that made it.
//!
//! Without a name from the caller, the subsystem's name carries a mark, and the creator holds a
//! lock on its directory. [`sweep()`] removes marked subsystems without a creator. With a name from
//! the caller, the target lasts until the creator, or a successor, finds it by that name and
//! removes it.

mod configfs;
mod mark;
mod port;
pub(crate) mod ram;

pub use self::mark::new_name;

use std::fmt;
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use aquifer_nvme::proto::Nqn;
use aquifer_page::Bytes;

use self::configfs::{HOSTS, Subsystem};
use self::ram::Ram;
use super::{NvmeError, Root, Transport};

/// Parameters of a target.
#[derive(Clone, Debug)]
pub struct Wish {
    /// Name of the subsystem. A named target outlives its creator. With `None` the target gets a
    /// new name and is removed with its creator.
    pub name: Option<Nqn>,
    /// The size of the device.
    pub capacity: Bytes,
    /// The most RAM that the device may take; writes beyond it fail. Only zram supports it.
    pub quota: Option<Bytes>,
    /// Addresses at which hosts connect.
    pub ports: Vec<(Transport, SocketAddr)>,
    /// NQNs of the admitted hosts; empty admits every host.
    pub allowed: Vec<Nqn>,
    /// Secrets for DH-HMAC-CHAP with those hosts; `None` disables authentication.
    pub secrets: Option<HostSecrets>,
}

/// The secrets that hosts and target share, each in the form `DHHC-1:…:`.
#[derive(Clone)]
pub struct HostSecrets {
    /// The hosts' secret.
    pub host: String,
    /// The target's secret, with which it authenticates itself to hosts that ask.
    pub target: String,
}

impl fmt::Debug for HostSecrets {
    /// Leaves out the secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostSecrets").finish_non_exhaustive()
    }
}

/// RAM that this host lends. Dropping an unnamed target removes it and ignores errors;
/// [`Self::remove`] reports them.
#[derive(Debug)]
pub struct Target {
    root: Root,
    subsystem: Subsystem,
    ram: Ram,
    /// Lock that shows that the creator lives; `None` for a named target.
    mark: Option<File>,
}

impl Target {
    /// Makes the RAM disk, the subsystem and its ports, after a [`sweep()`].
    ///
    /// # Errors
    /// Fails if the kernel lacks the target or RAM disks, or refuses a port. The function then
    /// undoes its steps; the error says so if it cannot.
    pub fn make(root: &Root, wish: &Wish) -> Result<Self, NvmeError> {
        let _alone = configfs::lock(root)?;
        sweep_alone(root)?;
        let subsystem = Subsystem::new(root, wish.name.clone().unwrap_or_else(new_name));
        let made = make(root, &subsystem, wish);
        made.map_err(|error| match subsystem.take_away() {
            Ok(()) => error,
            Err(left) => NvmeError { why: format!("{}; and {left}", error.why), ..error },
        })
    }

    /// Finds a served target by the name that its creator gave. Removes an unfinished one and
    /// returns `None`.
    ///
    /// # Errors
    /// Fails if configfs cannot be read, or a part of an unfinished target cannot be removed.
    pub fn find(root: &Root, name: &Nqn) -> Result<Option<Self>, NvmeError> {
        let subsystem = Subsystem::new(root, name.clone());
        if !subsystem.is_there() {
            return Ok(None);
        }
        let _alone = configfs::lock(root)?;
        match subsystem.ram().filter(|_| subsystem.is_enabled()) {
            Some(ram) if port::serves(root, name)? => {
                Ok(Some(Self { root: root.clone(), subsystem, ram, mark: None }))
            }
            _ => subsystem.take_away().map(|()| None),
        }
    }

    /// Returns the subsystem's name.
    pub fn nqn(&self) -> &Nqn {
        self.subsystem.nqn()
    }

    /// Returns the device node of the RAM disk.
    pub fn device(&self) -> PathBuf {
        self.ram.device()
    }

    /// Returns the size of the RAM disk. A brd disk may be larger than requested.
    pub fn capacity(&self) -> Bytes {
        self.ram.size(&self.root)
    }

    /// Returns the RAM that the disk takes: zram reports it, brd counts in full.
    pub fn stored(&self) -> Bytes {
        self.ram.stored(&self.root)
    }

    /// Tells whether the RAM stays in use after removal, as with brd.
    pub fn keeps_ram(&self) -> bool {
        matches!(self.ram, Ram::Brd(_))
    }

    /// Removes the target, even while hosts are connected; their pages are lost.
    ///
    /// # Errors
    /// Fails if a part cannot be removed. The next [`sweep()`] retries an unnamed target.
    pub fn remove(mut self) -> Result<(), NvmeError> {
        self.take_away()
    }

    fn take_away(&mut self) -> Result<(), NvmeError> {
        let _alone = configfs::lock(&self.root)?;
        drop(self.mark.take());
        self.subsystem.take_away()
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if self.mark.is_some() {
            // No caller gets the error. The next sweep finds the rest.
            let _ = self.take_away();
        }
    }
}

/// Checks that the kernel has a target that can be configured.
///
/// # Errors
/// Fails with the missing part if it has none.
pub fn check(root: &Root) -> Result<(), NvmeError> {
    if configfs::is_there(root) { Ok(()) } else { Err(configfs::no_target(root)) }
}

fn make(root: &Root, subsystem: &Subsystem, wish: &Wish) -> Result<Target, NvmeError> {
    let mark = subsystem.make()?;
    subsystem.allow(&wish.allowed, wish.secrets.as_ref())?;
    // Sets the path before the size, so that a sweep can find every disk that takes RAM.
    let ram = Ram::add(root, wish.capacity)?;
    subsystem.name_device(&ram.device())?;
    ram.set_size(root, wish.capacity, wish.quota)?;
    subsystem.enable()?;
    for (transport, address) in &wish.ports {
        port::open(root, subsystem.nqn(), *transport, *address)?;
    }
    Ok(Target {
        root: root.clone(),
        subsystem: subsystem.clone(),
        ram,
        mark: wish.name.is_none().then_some(mark),
    })
}

/// Removes marked targets without a living creator, and returns the names of their subsystems.
/// Leaves subsystems alone that an operator or nvmetcli made.
///
/// # Errors
/// Fails if a part cannot be removed.
pub fn sweep(root: &Root) -> Result<Vec<Nqn>, NvmeError> {
    if !configfs::is_there(root) {
        return Ok(Vec::new());
    }
    let _alone = configfs::lock(root)?;
    sweep_alone(root)
}

fn sweep_alone(root: &Root) -> Result<Vec<Nqn>, NvmeError> {
    let mut swept = Vec::new();
    for subsystem in Subsystem::marked(root)? {
        if subsystem.seize()?.is_some() {
            subsystem.take_away()?;
            swept.push(subsystem.nqn().clone());
        }
    }
    port::sweep(root)?;
    Ok(swept)
}

/// Removes a host object that is no longer used; the kernel refuses while a subsystem links to it.
/// An object with a secret and an unmarked name belongs to another program and stays.
fn forget_host(root: &Root, host: &str) {
    let path = Path::new(HOSTS).join(host);
    let has_secret = root.read(path.join("dhchap_key")).is_some_and(|key| !key.is_empty());
    if mark::is_ours(host) || !has_secret {
        let _ = root.remove_dir(path);
    }
}

#[cfg(test)]
mod tests;
