//! The memory that a host has set aside for its guests, and the share of each (`GM_mgr` of
//! \[Bielski18\], section III).
//!
//! The account is a file that one process at a time reads and changes. A VM's growth is noted
//! before the VM gets the memory, and its shrinking after the memory is back. So a process that
//! dies in between leaves too much noted and never too little, and the next one corrects it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use aquifer_page::{Bytes, RegionName};
use aquifer_procfs::total_memory;
use aquifer_region::process::client::By;
use aquifer_region::process::{lock_file, record};
use serde::{Deserialize, Serialize};

use crate::error::VmError;
use crate::process::Files;

/// The place of a VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// RAM of this host.
    Local,
    /// The pool, with local RAM as its cache.
    Pool,
    /// A region whose cache the host's agent sizes: at first all of it is in RAM of this host.
    Auto,
}

/// A VM's share of the memory that is set aside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Place of the memory.
    pub kind: Kind,
    /// RAM of this host: the VM's memory, or its cache.
    pub local: Bytes,
    /// The size of the VM's memory, if that is a region.
    pub pool: Bytes,
    /// Capacity of the VM's leases, once it has some: the bound of its memory in the pool.
    pub leased: Bytes,
    /// The most RAM that its cache may take, if the agent sizes the cache.
    #[serde(default)]
    pub cache: Bytes,
    /// RAM of this host that only this VM gets, if it runs out of memory. A VM whose cache the
    /// operator sizes has its leases instead.
    pub reserve: Bytes,
    /// Size of the reserve while none of it is in use.
    pub full_reserve: Bytes,
}

impl Share {
    /// Makes the share of a VM whose memory is in RAM of this host.
    pub fn local(size: Bytes) -> Self {
        let none = Bytes::ZERO;
        Self {
            kind: Kind::Local,
            local: size,
            pool: none,
            leased: none,
            cache: none,
            reserve: none,
            full_reserve: none,
        }
    }

    /// Makes the share of a VM whose `cache` the operator sizes: `size` now, up to `max`.
    pub fn pool(size: Bytes, max: Bytes, cache: Bytes) -> Self {
        Self { kind: Kind::Pool, pool: size, leased: max, ..Self::local(cache) }
    }

    /// Makes the share of a VM whose `cache` the agent sizes: `size` now, up to `max`.
    pub fn auto(size: Bytes, max: Bytes, cache: Bytes) -> Self {
        let local = Self::local(size.min(cache));
        Self { kind: Kind::Auto, pool: size, leased: max, cache, ..local }
    }

    /// Returns the size of the VM's memory, wherever it is.
    pub fn memory(&self) -> Bytes {
        match self.kind {
            Kind::Local => self.local,
            Kind::Pool | Kind::Auto => self.pool,
        }
    }

    /// Returns this share with another size of the VM's memory.
    fn with_size(&self, size: Bytes) -> Self {
        match self.kind {
            Kind::Local => Self { local: size, ..self.clone() },
            Kind::Pool => Self { pool: size, ..self.clone() },
            Kind::Auto => Self { pool: size, local: size.min(self.cache), ..self.clone() },
        }
    }

    /// Returns this share with another limit of its cache, which the agent chose or the operator.
    fn with_cache(&self, cache: Bytes, by: By) -> Self {
        let size = self.memory();
        match by {
            By::Agent => Self { kind: Kind::Auto, cache, local: size.min(cache), ..self.clone() },
            By::Operator => Self { kind: Kind::Pool, local: cache, ..self.clone() },
        }
    }

    /// Sets the VM's reserve.
    ///
    /// # Errors
    /// [`VmError::Misuse`] if the operator sizes its cache and `reserve` is not zero.
    pub fn keep(&mut self, reserve: Bytes) -> Result<(), VmError> {
        if self.kind == Kind::Pool && reserve > Bytes::ZERO {
            let why = "a VM with a cache of a fixed size needs no reserve, as its leases serve no \
                       other VM: set --reserve 0 first";
            return Err(VmError::Misuse(why.to_owned()));
        }
        (self.reserve, self.full_reserve) = (reserve, reserve);
        Ok(())
    }

    /// Returns the part of its leases that the VM's memory in the pool does not use.
    fn unleased(&self) -> Bytes {
        self.leased.saturating_sub(self.pool)
    }
}

/// An account of one kind of memory. `reserved` is `used` plus `free`, unless guests have more than
/// that; then `free` is zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    /// Memory set aside for guests.
    pub reserved: Bytes,
    /// Memory that guests have.
    pub used: Bytes,
    /// Memory that is left.
    pub free: Bytes,
}

impl Account {
    fn of(reserved: Bytes, used: Bytes) -> Self {
        Self { reserved, used, free: reserved.saturating_sub(used) }
    }
}

/// All memory that is set aside for guests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accounts {
    /// The unit in which guests get memory.
    pub section: Bytes,
    /// RAM of this host.
    pub local: Account,
    /// Leases of the VMs whose caches the operator sizes.
    pub pool: Account,
    /// Part of `local.free` that is reserved for VMs that run out of memory.
    pub promised: Bytes,
    /// The share of each VM.
    pub vms: BTreeMap<RegionName, Share>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Book {
    /// RAM set aside for guests; `None` for all of the host's.
    total: Option<Bytes>,
    section: Option<Bytes>,
    vms: BTreeMap<RegionName, Share>,
}

impl Book {
    fn accounts(&self, all: Bytes) -> Accounts {
        let sum = |of: fn(&Share) -> Bytes| self.vms.values().map(of).sum();
        Accounts {
            section: self.section.unwrap_or(Budget::SECTION),
            local: Account::of(self.total.unwrap_or(all), sum(|share| share.local)),
            pool: Account::of(
                sum(|share| if share.kind == Kind::Pool { share.leased } else { Bytes::ZERO }),
                sum(|share| if share.kind == Kind::Pool { share.pool } else { Bytes::ZERO }),
            ),
            promised: sum(|share| share.reserve),
            vms: self.vms.clone(),
        }
    }

    /// Returns the share of a VM, provided that the RAM that it `needs` in addition is free.
    fn with_room(
        &mut self,
        vm: &RegionName,
        all: Bytes,
        needs: impl Fn(&Share) -> Bytes,
    ) -> Result<&mut Share, VmError> {
        let (free, accounts) = (self.unpromised(all), self.accounts(all));
        let share = self.vms.get_mut(vm).ok_or_else(|| VmError::Unknown(vm.clone()))?;
        let needs = needs(share);
        if needs > free {
            return Err(no_room(needs, free, &accounts));
        }
        Ok(share)
    }

    /// Returns the free RAM that is not reserved for any VM.
    fn unpromised(&self, all: Bytes) -> Bytes {
        let Accounts { local, promised, .. } = self.accounts(all);
        local.free.saturating_sub(promised)
    }
}

/// The account of the memory set aside for a host's guests.
#[derive(Clone, Debug)]
pub struct Budget {
    run_dir: PathBuf,
}

impl Budget {
    /// The default unit in which guests get memory: Linux on x86-64 adds and removes that much at a
    /// time.
    pub const SECTION: Bytes = Bytes::mib(128);

    /// Opens the account of the host whose processes have their files in `run_dir`.
    pub fn of(run_dir: &Path) -> Self {
        Self { run_dir: run_dir.to_owned() }
    }

    /// Lists each VM's share; shares of vanished VMs are reclaimed.
    ///
    /// # Errors
    /// [`VmError::Io`] if the file cannot be read or written.
    pub fn accounts(&self) -> Result<Accounts, VmError> {
        self.change(|book, all| Ok(book.accounts(all)))
    }

    /// Sets the RAM for guests, and the unit in which they get it. `None` leaves a value unchanged.
    ///
    /// # Errors
    /// [`VmError::Misuse`] if guests have more already, the host has less, or the section is
    /// invalid.
    pub fn set(&self, total: Option<Bytes>, section: Option<Bytes>) -> Result<Accounts, VmError> {
        self.change(|book, all| {
            let Accounts { local, promised, .. } = book.accounts(all);
            if let Some(total) = total {
                let taken = local.used + promised;
                if total < taken {
                    let why = format!(
                        "guests of this host use {taken} already: shrink or stop a VM first"
                    );
                    return Err(VmError::Misuse(why));
                }
                if total > all {
                    let why = format!("this host has only {all} of RAM");
                    return Err(VmError::Misuse(why));
                }
                book.total = Some(total);
            }
            if let Some(section) = section {
                if section.0 == 0 || section.0 % Bytes::mib(2).0 != 0 {
                    let why = format!("a section must be a multiple of 2MiB, and {section} is not");
                    return Err(VmError::Misuse(why));
                }
                book.section = Some(section);
            }
            Ok(book.accounts(all))
        })
    }

    /// Notes the share of a VM that is about to start.
    ///
    /// # Errors
    /// [`VmError::NoRoom`] if its memory and its reserve are not free.
    pub fn admit(&self, vm: &RegionName, share: &Share) -> Result<(), VmError> {
        self.change(|book, all| {
            book.vms.remove(vm);
            let (needs, free) = (share.local + share.reserve, book.unpromised(all));
            if needs > free {
                return Err(no_room(needs, free, &book.accounts(all)));
            }
            book.vms.insert(vm.clone(), share.clone());
            Ok(())
        })
    }

    /// Notes that a VM gets `by` more. An `urgent` VM may draw on its reserve.
    ///
    /// # Errors
    /// [`VmError::NoRoom`] if not enough is free; nothing is noted then.
    pub fn grow(&self, vm: &RegionName, by: Bytes, urgent: bool) -> Result<(), VmError> {
        self.change(|book, all| {
            let free = book.unpromised(all);
            let accounts = book.accounts(all);
            let share = book.vms.get_mut(vm).ok_or_else(|| VmError::Unknown(vm.clone()))?;
            let grown = share.with_size(share.memory() + by);
            let reserve = if urgent { share.reserve } else { Bytes::ZERO };
            let (needs, free) = match share.kind {
                Kind::Local | Kind::Auto => {
                    (grown.local.saturating_sub(share.local), free + reserve)
                }
                Kind::Pool => (by, share.unleased()),
            };
            if needs > free {
                return Err(no_room(needs, free, &accounts));
            }
            let drawn = if urgent { needs } else { Bytes::ZERO };
            *share = Share { reserve: grown.reserve.saturating_sub(drawn), ..grown };
            Ok(())
        })
    }

    /// Returns the least and the most by which a VM that is out of memory can grow. The least is
    /// its reserve; the most adds the free RAM that no VM has reserved. For a VM whose cache the
    /// operator sizes they are zero, and the rest of its leases.
    ///
    /// # Errors
    /// [`VmError::Unknown`] if the VM has no share; [`VmError::Io`] if the file cannot be
    /// read or written.
    pub fn in_need(&self, vm: &RegionName) -> Result<(Bytes, Bytes), VmError> {
        self.change(|book, all| {
            let free = book.unpromised(all);
            let share = book.vms.get(vm).ok_or_else(|| VmError::Unknown(vm.clone()))?;
            Ok(match share.kind {
                Kind::Local => (share.reserve, share.reserve + free),
                Kind::Pool => (Bytes::ZERO, share.unleased()),
                // Beyond its cache it grows without RAM of this host.
                Kind::Auto => match share.reserve + free {
                    room if share.cache.saturating_sub(share.local) <= room => {
                        (share.reserve, share.unleased())
                    }
                    room => (share.reserve, room),
                },
            })
        })
    }

    /// Notes the size that a VM was found to have, and refills its reserve from free RAM.
    ///
    /// # Errors
    /// [`VmError::Io`] if the file cannot be read or written.
    pub fn settle(&self, vm: &RegionName, size: Bytes) -> Result<(), VmError> {
        self.change(|book, all| {
            let Some(share) = book.vms.get_mut(vm) else { return Ok(()) };
            *share = share.with_size(size);
            let missing = share.full_reserve.saturating_sub(share.reserve);
            let free = book.unpromised(all);
            if let Some(share) = book.vms.get_mut(vm) {
                share.reserve += missing.min(free);
            }
            Ok(())
        })
    }

    /// Notes the RAM that a VM's cache may have, and the party that sizes the cache.
    ///
    /// # Errors
    /// [`VmError::NoRoom`] if the increase is not free; [`VmError::Misuse`] if the operator sizes
    /// the cache of a VM with a reserve.
    pub fn cache(&self, vm: &RegionName, cache: Bytes, by: By) -> Result<(), VmError> {
        self.resize(vm, |share| share.with_cache(cache, by))
    }

    /// Notes the same before a change of the cache, during which the VM may still have what it has.
    ///
    /// # Errors
    /// As [`Budget::cache`].
    pub fn cache_and_before(&self, vm: &RegionName, cache: Bytes, by: By) -> Result<(), VmError> {
        self.resize(vm, |share| {
            let resized = share.with_cache(cache, by);
            let (local, cache) = (resized.local.max(share.local), resized.cache.max(share.cache));
            Share { local, cache, ..resized }
        })
    }

    fn resize(&self, vm: &RegionName, change: impl Fn(&Share) -> Share) -> Result<(), VmError> {
        self.change(|book, all| {
            let grows = |share: &Share| change(share).local.saturating_sub(share.local);
            let share = book.with_room(vm, all, grows)?;
            let mut resized = change(share);
            resized.keep(share.full_reserve)?;
            *share = Share { reserve: share.reserve, ..resized };
            Ok(())
        })
    }

    /// Sets a VM's reserve.
    ///
    /// # Errors
    /// [`VmError::NoRoom`] if the increase is not free; [`VmError::Misuse`] if the operator sizes
    /// the VM's cache.
    pub fn promise(&self, vm: &RegionName, reserve: Bytes) -> Result<(), VmError> {
        self.change(|book, all| {
            let share = book.with_room(vm, all, |share| reserve.saturating_sub(share.reserve))?;
            share.keep(reserve)
        })
    }

    /// Notes that a VM is gone.
    ///
    /// # Errors
    /// [`VmError::Io`] if the file cannot be read or written.
    pub fn forget(&self, vm: &RegionName) -> Result<(), VmError> {
        self.change(|book, _| {
            book.vms.remove(vm);
            Ok(())
        })
    }

    /// Changes the file under its lock. `change` also gets the host's RAM. Writes nothing if
    /// `change` fails or leaves the content equal.
    fn change<T>(
        &self,
        change: impl FnOnce(&mut Book, Bytes) -> Result<T, VmError>,
    ) -> Result<T, VmError> {
        let fail = || VmError::io("cannot read or write the budget of guests' memory");
        let all = total_memory().map_err(fail())?;
        fs::create_dir_all(&self.run_dir).map_err(fail())?;
        // The lock's holder only reads and writes small files, and never blocks on another process.
        let _lock = lock_file(&self.run_dir.join("guests.lock")).map_err(fail())?;
        let path = self.run_dir.join("guests.json");
        let before: Book = record::read(&path).map_err(fail())?.unwrap_or_default();
        let mut book = before.clone();
        book.vms.retain(|vm, _| Files::new(&self.run_dir, vm).has_memory());
        let done = change(&mut book, all)?;
        if book != before {
            record::write(&path, &book).map_err(fail())?;
        }
        Ok(done)
    }
}

fn no_room(needs: Bytes, free: Bytes, accounts: &Accounts) -> VmError {
    let Account { reserved, used, .. } = accounts.local;
    VmError::NoRoom { needs, free, reserved, used, promised: accounts.promised }
}

#[cfg(test)]
mod tests;
