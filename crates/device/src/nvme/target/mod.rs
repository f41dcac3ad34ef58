//! Lease backend `kernel`: RAM of this host lent by the kernel's own NVMe target, over TCP and RDMA.
//!
//! A [`Target`] is a RAM disk (zram, or brd where there is none) as the one namespace of a subsystem of nvmet, and ports on
//! which hosts reach it, all made through configfs. None of it needs its maker to live, so all of it carries a mark in
//! its name, and its maker holds a lock on the subsystem's directory: [`sweep()`] removes what has the mark and no maker.
//! What is made with a name of its maker's own lasts instead, until its maker, or who comes after, finds and removes it by that.

mod configfs;
mod mark;
mod port;
pub(crate) mod ram;

pub use self::mark::new_name;

use std::fmt;
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use aquifer_fabric::nvme::proto::Nqn;
use aquifer_page::Bytes;

use self::configfs::{HOSTS, Subsystem};
use self::ram::Ram;
use super::{NvmeError, Root, Transport};

/// What is to be lent.
#[derive(Clone, Debug)]
pub struct Wish {
    /// The subsystem's name, under which it outlives its maker; without one it gets a new name and goes with its maker.
    pub name: Option<Nqn>,
    /// The size of the device.
    pub capacity: Bytes,
    /// The most RAM it may take; beyond it a write fails. zram only.
    pub quota: Option<Bytes>,
    /// Where hosts come.
    pub ports: Vec<(Transport, SocketAddr)>,
    /// Which hosts may; all, if there are none.
    pub allowed: Vec<Nqn>,
    /// By what those hosts must prove their names (DH-HMAC-CHAP).
    pub secrets: Option<HostSecrets>,
}

/// What hosts and the target must know of each other, each in the form `DHHC-1:…:`.
#[derive(Clone)]
pub struct HostSecrets {
    /// The hosts'.
    pub host: String,
    /// The target's, by which it proves its own name to hosts that ask.
    pub target: String,
}

impl fmt::Debug for HostSecrets {
    /// Without them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostSecrets").finish_non_exhaustive()
    }
}

/// RAM that is lent. Dropping one that goes with its maker takes it away, if that works; [`Self::remove`] tells.
#[derive(Debug)]
pub struct Target {
    root: Root,
    subsystem: Subsystem,
    ram: Ram,
    /// Says that the maker lives; none for what lasts.
    mark: Option<File>,
}

impl Target {
    /// Makes the RAM disk, the subsystem and its ports, after a [`sweep()`].
    ///
    /// # Errors
    /// If the kernel lacks the target or RAM disks, or refuses a port. Nothing is left then, unless the error says so.
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

    /// Finds what was made with a name of its maker's own, and is served. Of one that was not finished nothing is left.
    ///
    /// # Errors
    /// If configfs cannot be read, or something stays of what was not finished.
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

    /// The subsystem's name.
    pub fn nqn(&self) -> &Nqn {
        self.subsystem.nqn()
    }

    /// The RAM disk.
    pub fn device(&self) -> PathBuf {
        self.ram.device()
    }

    /// Its size, which is more than was wished where there is only brd.
    pub fn capacity(&self) -> Bytes {
        self.ram.size(&self.root)
    }

    /// The RAM that it takes now: of zram what it says, of brd all of it.
    pub fn stored(&self) -> Bytes {
        self.ram.stored(&self.root)
    }

    /// Whether the RAM stays taken when this is removed: brd gives none back.
    pub fn keeps_ram(&self) -> bool {
        matches!(self.ram, Ram::Brd(_))
    }

    /// Takes all of it away, hosts that are connected included: their pages are gone.
    ///
    /// # Errors
    /// If something stays; the next [`sweep()`] tries again.
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
            // Nobody is left to tell; the next sweep finds what is left.
            let _ = self.take_away();
        }
    }
}

/// Whether the kernel has a target to be configured.
///
/// # Errors
/// If not, with what is missing.
pub fn check(root: &Root) -> Result<(), NvmeError> {
    if configfs::is_there(root) { Ok(()) } else { Err(configfs::no_target(root)) }
}

fn make(root: &Root, subsystem: &Subsystem, wish: &Wish) -> Result<Target, NvmeError> {
    let mark = subsystem.make()?;
    subsystem.allow(&wish.allowed, wish.secrets.as_ref())?;
    // Named before it has a size, so that whatever takes RAM can be found.
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

/// Removes what targets left whose makers are gone; returns the names of their subsystems. Those that others have made, by
/// hand or by nvmetcli, are left alone.
///
/// # Errors
/// If something stays.
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

/// Removes what stands for a host, if nobody needs it any more: the kernel keeps what is bound to a subsystem, and one with a
/// secret and no name of ours is not ours.
fn forget_host(root: &Root, host: &str) {
    let path = Path::new(HOSTS).join(host);
    let has_secret = root.read(path.join("dhchap_key")).is_some_and(|key| !key.is_empty());
    if mark::is_ours(host) || !has_secret {
        let _ = root.remove_dir(path);
    }
}

#[cfg(test)]
mod tests;
