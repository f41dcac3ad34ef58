//! The memory that a host has set aside for its guests, and whose it is: the manager of the paper (`GM_mgr`, Resizing, section III).
//!
//! It is a file that one process at a time reads and changes. What a VM is to have is noted there before it gets it, and what it gives back when that is
//! back, so whoever dies in between leaves too much noted and never too little; who goes on sets it right.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use aquifer_page::{Bytes, RegionName};
use aquifer_region::process::{lock_file, record};
use serde::{Deserialize, Serialize};

use crate::error::GuestError;
use crate::meminfo;
use crate::process::Files;

/// Where a VM's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// In RAM of this host, all of it.
    Local,
    /// In the pool, with local RAM as its cache.
    Pool,
}

/// What a VM has of the memory that is set aside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Where its sections are.
    pub kind: Kind,
    /// RAM of this host: its memory, or its cache of it.
    pub local: Bytes,
    /// Memory of the pool.
    pub pool: Bytes,
    /// What its leases hold: it never has more of the pool.
    pub leased: Bytes,
    /// RAM of this host that nobody else gets: for when it is out of memory. One whose memory is in the pool has its leases for that.
    pub reserve: Bytes,
    /// What is kept as its reserve when nothing of it is in use.
    pub full_reserve: Bytes,
}

impl Share {
    /// Of a VM whose memory is in RAM of this host.
    pub fn local(size: Bytes) -> Self {
        let none = Bytes::ZERO;
        Self {
            kind: Kind::Local,
            local: size,
            pool: none,
            leased: none,
            reserve: none,
            full_reserve: none,
        }
    }

    /// Of a VM whose memory is in the pool.
    pub fn pool(size: Bytes, max: Bytes, cache: Bytes) -> Self {
        Self { kind: Kind::Pool, pool: size, leased: max, ..Self::local(cache) }
    }

    /// The VM's memory, wherever it is.
    pub fn memory(&self) -> Bytes {
        match self.kind {
            Kind::Local => self.local,
            Kind::Pool => self.pool,
        }
    }

    /// Has so much be kept for when it is out of memory.
    ///
    /// # Errors
    /// [`GuestError::Misuse`] where its memory is in the pool.
    pub fn keep(&mut self, reserve: Bytes) -> Result<(), GuestError> {
        if self.kind == Kind::Pool && reserve > Bytes::ZERO {
            let why = "a VM whose memory is in the pool needs no reserve: its leases are its own"
                .to_owned();
            return Err(GuestError::Misuse(why));
        }
        (self.reserve, self.full_reserve) = (reserve, reserve);
        Ok(())
    }

    fn size(&mut self) -> &mut Bytes {
        match self.kind {
            Kind::Local => &mut self.local,
            Kind::Pool => &mut self.pool,
        }
    }
}

/// Memory of one kind: `reserved` is always `used` and `free` together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    /// Set aside for guests.
    pub reserved: Bytes,
    /// What they have.
    pub used: Bytes,
    /// What is left.
    pub free: Bytes,
}

impl Account {
    fn of(reserved: Bytes, used: Bytes) -> Self {
        Self { reserved, used, free: reserved.saturating_sub(used) }
    }
}

/// All that is set aside for guests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accounts {
    /// The unit in which guests get memory.
    pub section: Bytes,
    /// RAM of this host.
    pub local: Account,
    /// Leases of VMs whose memory is in the pool.
    pub pool: Account,
    /// What of `local.free` is kept for VMs that may be out of memory.
    pub promised: Bytes,
    /// What each has.
    pub vms: BTreeMap<RegionName, Share>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Book {
    /// All memory of the host, unless told.
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
            pool: Account::of(sum(|share| share.leased), sum(|share| share.pool)),
            promised: sum(|share| share.reserve),
            vms: self.vms.clone(),
        }
    }

    /// The share of a VM for which there is as much RAM as it `needs` more.
    fn with_room(
        &mut self,
        vm: &RegionName,
        all: Bytes,
        needs: impl Fn(&Share) -> Bytes,
    ) -> Result<&mut Share, GuestError> {
        let (free, accounts) = (self.unpromised(all), self.accounts(all));
        let share = self.vms.get_mut(vm).ok_or_else(|| GuestError::Unknown(vm.clone()))?;
        let needs = needs(share);
        if needs > free {
            return Err(no_room(needs, free, &accounts));
        }
        Ok(share)
    }

    /// RAM that whoever may have, who has no promise of it.
    fn unpromised(&self, all: Bytes) -> Bytes {
        let Accounts { local, promised, .. } = self.accounts(all);
        local.free.saturating_sub(promised)
    }
}

/// The memory set aside for guests of a host.
#[derive(Clone, Debug)]
pub struct Budget {
    run_dir: PathBuf,
}

impl Budget {
    /// What guests get memory in, unless told: what Linux adds and removes at a time on x86-64.
    pub const SECTION: Bytes = Bytes::mib(128);

    /// Of the host whose processes have their files in `run_dir`.
    pub fn of(run_dir: &Path) -> Self {
        Self { run_dir: run_dir.to_owned() }
    }

    /// Whose what is. What VMs have left that are gone is free again.
    ///
    /// # Errors
    /// Where the file cannot be read or written.
    pub fn accounts(&self) -> Result<Accounts, GuestError> {
        self.change(|book, all| Ok(book.accounts(all)))
    }

    /// Sets aside so much RAM for guests, and the unit in which they get it; what is not given stays as it is.
    ///
    /// # Errors
    /// [`GuestError::Misuse`] where guests have more already, the host has less, or the section cannot be.
    pub fn set(
        &self,
        total: Option<Bytes>,
        section: Option<Bytes>,
    ) -> Result<Accounts, GuestError> {
        self.change(|book, all| {
            let Accounts { local, promised, .. } = book.accounts(all);
            if let Some(total) = total {
                let taken = local.used + promised;
                if total < taken {
                    let why = format!(
                        "guests of this host have {taken} already: shrink or stop some first"
                    );
                    return Err(GuestError::Misuse(why));
                }
                if total > all {
                    let why = format!("this host has {all} of RAM in all");
                    return Err(GuestError::Misuse(why));
                }
                book.total = Some(total);
            }
            if let Some(section) = section {
                if section.0 == 0 || section.0 % Bytes::mib(2).0 != 0 {
                    let why = format!("a section is of whole 2MiB, which {section} is not");
                    return Err(GuestError::Misuse(why));
                }
                book.section = Some(section);
            }
            Ok(book.accounts(all))
        })
    }

    /// Notes what a VM has that is about to be started.
    ///
    /// # Errors
    /// [`GuestError::NoRoom`].
    pub fn admit(&self, vm: &RegionName, share: &Share) -> Result<(), GuestError> {
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

    /// Notes that a VM is to have so much more. Its reserve is for those who are `urgent`.
    ///
    /// # Errors
    /// [`GuestError::NoRoom`]: nothing has been noted then.
    pub fn grow(&self, vm: &RegionName, by: Bytes, urgent: bool) -> Result<(), GuestError> {
        self.change(|book, all| {
            let free = book.unpromised(all);
            let accounts = book.accounts(all);
            let share = book.vms.get_mut(vm).ok_or_else(|| GuestError::Unknown(vm.clone()))?;
            let reserve = if urgent { share.reserve } else { Bytes::ZERO };
            let free = match share.kind {
                Kind::Local => free + reserve,
                Kind::Pool => share.leased.saturating_sub(share.pool),
            };
            if by > free {
                return Err(no_room(by, free, &accounts));
            }
            if share.kind == Kind::Local && urgent {
                share.reserve = share.reserve.saturating_sub(by);
            }
            *share.size() += by;
            Ok(())
        })
    }

    /// By how much a VM that is out of memory can grow at least: its reserve, and at most: with what nobody else is promised.
    ///
    /// # Errors
    /// Where the file cannot be read or written.
    pub fn in_need(&self, vm: &RegionName) -> Result<(Bytes, Bytes), GuestError> {
        self.change(|book, all| {
            let free = book.unpromised(all);
            let share = book.vms.get(vm).ok_or_else(|| GuestError::Unknown(vm.clone()))?;
            Ok(match share.kind {
                Kind::Local => (share.reserve, share.reserve + free),
                Kind::Pool => (Bytes::ZERO, share.leased.saturating_sub(share.pool)),
            })
        })
    }

    /// Notes what a VM has been found to have, and makes its reserve whole of what it gave back.
    ///
    /// # Errors
    /// Where the file cannot be read or written.
    pub fn settle(&self, vm: &RegionName, size: Bytes) -> Result<(), GuestError> {
        self.change(|book, all| {
            let Some(share) = book.vms.get_mut(vm) else { return Ok(()) };
            *share.size() = size;
            let missing = share.full_reserve.saturating_sub(share.reserve);
            let free = book.unpromised(all);
            if let Some(share) = book.vms.get_mut(vm) {
                share.reserve += missing.min(free);
            }
            Ok(())
        })
    }

    /// Notes how much RAM a VM's cache may have.
    ///
    /// # Errors
    /// [`GuestError::NoRoom`].
    pub fn cache(&self, vm: &RegionName, cache: Bytes) -> Result<(), GuestError> {
        self.change(|book, all| {
            book.with_room(vm, all, |share| cache.saturating_sub(share.local))?.local = cache;
            Ok(())
        })
    }

    /// Keeps so much for a VM that may be out of memory.
    ///
    /// # Errors
    /// [`GuestError::NoRoom`], and [`GuestError::Misuse`] where its memory is in the pool.
    pub fn promise(&self, vm: &RegionName, reserve: Bytes) -> Result<(), GuestError> {
        self.change(|book, all| {
            let share = book.with_room(vm, all, |share| reserve.saturating_sub(share.reserve))?;
            share.keep(reserve)
        })
    }

    /// Notes that a VM is gone.
    ///
    /// # Errors
    /// Where the file cannot be read or written.
    pub fn forget(&self, vm: &RegionName) -> Result<(), GuestError> {
        self.change(|book, _| {
            book.vms.remove(vm);
            Ok(())
        })
    }

    /// What is done to the file, by one process at a time, with what the host has in all. Nothing is written if it fails, nor if it changes nothing.
    fn change<T>(
        &self,
        change: impl FnOnce(&mut Book, Bytes) -> Result<T, GuestError>,
    ) -> Result<T, GuestError> {
        let fail = || GuestError::io("cannot keep account of the memory of guests");
        let all = meminfo::total().map_err(fail())?;
        fs::create_dir_all(&self.run_dir).map_err(fail())?;
        // Under it small files are read and written, and nobody is waited for.
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

fn no_room(needs: Bytes, free: Bytes, accounts: &Accounts) -> GuestError {
    let Account { reserved, used, .. } = accounts.local;
    GuestError::NoRoom { needs, free, reserved, used, promised: accounts.promised }
}

#[cfg(test)]
mod tests;
