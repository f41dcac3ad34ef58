//! Handing out what groups save on a host (Groups, sections 4.2.2 and 7.1): each period it is read what the sharing of each saves and how its VMs are,
//! `aquifer_control::group` decides, VMs are told by their balloons what they have, and scanners who pays for them.

mod tenant;

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use aquifer_control::group::overhead::{self, Ledger};
use aquifer_guest::process::side_by_side;
use aquifer_page::{Bytes, Group, RegionName};
use aquifer_region::RegionError;
use serde::{Deserialize, Serialize};

use self::tenant::Tenant;
use crate::agreement::{Agreement, Agreements, GroupError};
use crate::cache;
use crate::scan::Sharing;
use crate::scan::payer::{self, Payer};

pub use aquifer_control::group::overhead::{Account, Change, Loan};
pub use aquifer_control::group::reprovision::{Plan, Verdict, Vm};

/// Why nothing can be handed out.
#[derive(Debug, thiserror::Error)]
pub enum BalanceError {
    /// A group's agreement.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// Its regions.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// Another one is at work.
    #[error(
        "what groups of this host save is handed out already, by another 'aquifer group balance' or the agent"
    )]
    Busy,
    /// What is locked by who is at work.
    #[error("locking {}: {source}", path.display())]
    Lock {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// What a period has found and done.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// Each group that has members here.
    pub groups: Vec<Balanced>,
    /// What they lend each other.
    pub loans: Vec<Loan>,
    /// What has changed of that.
    pub changes: Vec<Change>,
    /// Agreements that cannot be read, and why. Such a group goes on by what was read last.
    pub malformed: Vec<String>,
}

/// A group in a period.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Balanced {
    /// What it shares.
    #[serde(flatten)]
    pub sharing: Sharing,
    /// What of that it has to hand out, what others have of it, and who pays.
    pub account: Account,
    /// Its VMs, as they were found.
    pub vms: Vec<Vm>,
    /// What they are told to have.
    pub plan: Plan,
    /// The cache of its disks, if it has one, as it was left.
    pub cache: Option<cache::Status>,
    /// VMs that do not answer, and count as they were last seen.
    #[serde(default)]
    pub silent: Vec<RegionName>,
    /// What could not be done.
    pub failed: Vec<String>,
}

/// Hands out what the groups of a host save.
#[derive(Debug)]
pub struct Balancing {
    run_dir: PathBuf,
    agreements: Agreements,
    ledger: Ledger,
    tenants: BTreeMap<Group, Tenant>,
    /// What was wrong with agreements when they were last read.
    malformed: Vec<String>,
    /// Held from when this first acts: nobody else does.
    lock: Option<File>,
}

impl Balancing {
    /// Of the host whose processes have their files in `run_dir`, and whose groups have these agreements.
    pub fn new(run_dir: &Path, agreements: Agreements) -> Self {
        let ledger = Ledger::new(overhead::Config::default());
        Self {
            run_dir: run_dir.to_owned(),
            agreements,
            ledger,
            tenants: BTreeMap::new(),
            malformed: Vec::new(),
            lock: None,
        }
    }

    /// Looks at all groups, decides, and if it is to `act` tells VMs and scanners. To be called each period (1 s in the paper, section 6.1). Groups, and the VMs
    /// of each, are asked side by side, so a silent one costs the others no more than some seconds, now and then.
    ///
    /// # Errors
    /// [`BalanceError`]: agreements that cannot be listed, or another one that acts. What is wrong with one group is in [`Turn::malformed`]; what could not be
    /// told to a VM is in the [`Balanced`] of its group.
    pub fn turn(&mut self, act: bool) -> Result<Turn, BalanceError> {
        if act {
            self.alone()?;
        }
        let malformed = self.read_agreements()?;
        let directory = self.directory();
        let looked = side_by_side(self.tenants.values_mut(), |tenant| {
            let is = tenant.look()?;
            let cache = tenant.look_at_cache(&directory, is.sharing.saved_bytes);
            Ok::<_, RegionError>((tenant, is, cache))
        });
        let mut found = Vec::new();
        let mut turn = Turn { malformed, ..Turn::default() };
        for looked in looked {
            match looked {
                // One without members saves nothing, and its cache is to know.
                Ok(one) if one.1.sharing.regions > 0 || one.2.is_there() => found.push(one),
                Ok(_) => {}
                Err(error) => turn.malformed.push(error.to_string()),
            }
        }
        let readings: Vec<_> = found.iter().map(|(_, found, _)| found.reading.clone()).collect();
        let overhead::Plan { changes, loans, accounts } = self.ledger.step(&readings);
        (turn.loans, turn.changes) = (loans, changes);
        if act {
            let agreements: Vec<_> = found.iter().map(|(tenant, ..)| &tenant.agreement).collect();
            charge(&directory, &agreements, &accounts);
        }
        let run_dir = &self.run_dir;
        turn.groups =
            side_by_side(found.into_iter().zip(accounts), |((tenant, found, cache), account)| {
                tenant.balance((run_dir, &directory), found, cache, account, act)
            });
        Ok(turn)
    }

    /// Reads what groups agree on. One that cannot be read goes on by what was read last. Says what is wrong.
    fn read_agreements(&mut self) -> Result<Vec<String>, BalanceError> {
        let directory = self.directory();
        let mut malformed = Vec::new();
        let read = self.agreements.each()?;
        self.tenants.retain(|group, _| read.iter().any(|(name, _)| name == group));
        for (group, agreement) in read {
            match agreement {
                Ok(agreement) => {
                    let tenant = self
                        .tenants
                        .entry(group)
                        .or_insert_with(|| Tenant::new(&directory, &agreement));
                    tenant.agreement = agreement;
                }
                Err(error) => malformed.push(error.to_string()),
            }
        }
        if malformed != self.malformed {
            malformed.iter().for_each(|why| tracing::warn!("a group goes on as it was: {why}"));
            self.malformed.clone_from(&malformed);
        }
        Ok(malformed)
    }

    /// Has nobody else hand out what groups save.
    fn alone(&mut self) -> Result<(), BalanceError> {
        if self.lock.is_some() {
            return Ok(());
        }
        let path = self.run_dir.join("groups.lock");
        let fail = |source| BalanceError::Lock { path: path.clone(), source };
        fs::create_dir_all(&self.run_dir).map_err(fail)?;
        let mut options = OpenOptions::new();
        let lock = options
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&path)
            .map_err(fail)?;
        match lock.try_lock() {
            Ok(()) => self.lock = Some(lock),
            Err(TryLockError::WouldBlock) => return Err(BalanceError::Busy),
            Err(TryLockError::Error(source)) => return Err(fail(source)),
        }
        Ok(())
    }

    /// Where regions are.
    fn directory(&self) -> PathBuf {
        self.run_dir.join("regions")
    }

    /// Has each VM have what is its own, and no more.
    ///
    /// # Errors
    /// [`BalanceError`].
    pub fn undo(&mut self) -> Result<Vec<(RegionName, Bytes)>, BalanceError> {
        self.alone()?;
        let mut told = Vec::new();
        let directory = self.directory();
        for (_, agreement) in self.agreements.each()? {
            // What a group has that cannot be read goes back by hand.
            let Ok(agreement) = agreement.inspect_err(|error| tracing::warn!("{error}")) else {
                continue;
            };
            let mut tenant = Tenant::new(&directory, &agreement);
            let found = tenant.look()?;
            told.extend(tenant.tell_own(&self.run_dir, &found.vms));
        }
        Ok(told)
    }
}

/// Has scanners be on the accounts of those who pay for them.
fn charge(directory: &Path, agreements: &[&Agreement], accounts: &[Account]) {
    for Account { group, payer, .. } in accounts {
        let cgroup =
            agreements.iter().find(|one| one.name == *payer).and_then(|one| one.cgroup.clone());
        let payer = (payer != group).then(|| Payer { group: payer.clone(), cgroup });
        // Whoever did this before may have been killed.
        let charged = payer::read(directory, group).and_then(|now| {
            if now == payer { Ok(()) } else { payer::write(directory, group, payer.as_ref()) }
        });
        if let Err(error) = charged {
            tracing::warn!(%group, "who pays for its scanner stays as it was: {error}");
        }
    }
}

impl Drop for Balancing {
    /// Scanners are on the accounts of their own groups again: nobody keeps account of loans any more.
    fn drop(&mut self) {
        if self.lock.is_none() {
            return;
        }
        let directory = self.directory();
        for group in self.tenants.keys() {
            let _ = payer::write(&directory, group, None);
        }
    }
}
