//! The balancer of the memory that groups save on a host (\[Kim14\], sections 4.2.2 and 7.1).
//!
//! In each period the balancer reads the savings of each group and the state of its VMs, and
//! `aquifer_control::group` decides. The balancer then sets the VMs' balloons, and tells each
//! scanner which group pays for it.

mod tenant;

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use aquifer_control::group::overhead::{self, Ledger};
use aquifer_dedup::Sharing;
use aquifer_dedup::cpu_billing::{self, CpuBilling};
use aquifer_disk_cache::CacheStatus;
use aquifer_page::{Bytes, Group, RegionName};
use aquifer_region::RegionError;
use aquifer_vm::process::side_by_side;
use serde::{Deserialize, Serialize};

use self::tenant::Tenant;
use crate::agreement::{Agreement, Agreements, GroupError};

pub use aquifer_control::group::overhead::{Account, Change, Loan};
pub use aquifer_control::group::reprovision::{Plan, TargetDecision, Vm};

/// An error that prevents balancing.
#[derive(Debug, thiserror::Error)]
pub enum BalanceError {
    /// A group's agreement cannot be read.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// An operation on regions failed.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// Another balancer acts on this host.
    #[error(
        "another 'aquifer serve reprovision', or the agent, balances the groups of this host \
         already: stop it first"
    )]
    Busy,
    /// The lock file of the acting balancer cannot be locked.
    #[error("locking {}: {source}", path.display())]
    Lock {
        /// The lock file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// The findings and actions of a period.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BalanceRound {
    /// The groups that have members or a disk cache here.
    pub groups: Vec<Balanced>,
    /// Loans between groups.
    pub loans: Vec<Loan>,
    /// Changes of loans in this period.
    pub changes: Vec<Change>,
    /// Agreements or groups that cannot be read, and why. A group with such an agreement keeps the
    /// last one that was read.
    pub malformed: Vec<String>,
}

/// A group in a period.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Balanced {
    /// The group's sharing.
    #[serde(flatten)]
    pub sharing: Sharing,
    /// Savings to hand out, loans, and the group that pays for the scanner.
    pub account: Account,
    /// The group's VMs, as found at the start of the period.
    pub vms: Vec<Vm>,
    /// The sizes that the VMs are told.
    pub plan: Plan,
    /// The group's disk cache at the end of the period, if there is one.
    pub cache: Option<CacheStatus>,
    /// VMs that do not answer, and count as last seen.
    #[serde(default)]
    pub silent: Vec<RegionName>,
    /// News and failures, as text.
    pub failed: Vec<String>,
}

/// The balancer of the memory that a host's groups save.
#[derive(Debug)]
pub struct Balancing {
    run_dir: PathBuf,
    agreements: Agreements,
    ledger: Ledger,
    tenants: BTreeMap<Group, Tenant>,
    /// Errors of agreements in the last period.
    malformed: Vec<String>,
    /// The lock that excludes other balancers, held from the first action on.
    lock: Option<File>,
}

impl Balancing {
    /// Makes a balancer of the host whose processes have their files in `run_dir`.
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

    /// Reads all groups and decides; if `act`, also tells the VMs and the scanners. The caller
    /// calls this once a period (1 s in \[Kim14\], section 6.1).
    ///
    /// Groups, and the VMs of each, are queried in parallel. So a silent one delays the others by
    /// no more than some seconds, once in a while.
    ///
    /// # Errors
    /// [`BalanceError`] if the agreements cannot be listed, or another balancer acts. Errors of one
    /// group are in [`BalanceRound::malformed`]; failures to tell a VM are in the [`Balanced`] of
    /// its group.
    pub fn step(&mut self, act: bool) -> Result<BalanceRound, BalanceError> {
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
        let mut round = BalanceRound { malformed, ..BalanceRound::default() };
        for looked in looked {
            match looked {
                // A group without members saves nothing, and its cache must hear that.
                Ok(one) if one.1.sharing.regions > 0 || one.2.is_there() => found.push(one),
                Ok(_) => {}
                Err(error) => round.malformed.push(error.to_string()),
            }
        }
        let readings: Vec<_> = found.iter().map(|(_, found, _)| found.reading.clone()).collect();
        let overhead::Plan { changes, loans, accounts } = self.ledger.step(&readings);
        (round.loans, round.changes) = (loans, changes);
        if act {
            let agreements: Vec<_> = found.iter().map(|(tenant, ..)| &tenant.agreement).collect();
            charge(&directory, &agreements, &accounts);
        }
        let run_dir = &self.run_dir;
        round.groups =
            side_by_side(found.into_iter().zip(accounts), |((tenant, found, cache), account)| {
                tenant.balance((run_dir, &directory), found, cache, account, act)
            });
        Ok(round)
    }

    /// Reads the agreements, and returns the errors. A group with an unreadable agreement keeps its
    /// last one.
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
            malformed
                .iter()
                .for_each(|why| tracing::warn!("a group keeps its last agreement: {why}"));
            self.malformed.clone_from(&malformed);
        }
        Ok(malformed)
    }

    /// Excludes other balancers on this host.
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

    /// Returns the directory of the regions.
    fn directory(&self) -> PathBuf {
        self.run_dir.join("regions")
    }

    /// Returns each VM to its own size.
    ///
    /// # Errors
    /// [`BalanceError`] if another balancer acts, or the agreements or a group's regions cannot be
    /// read.
    pub fn undo(&mut self) -> Result<Vec<(RegionName, Bytes)>, BalanceError> {
        self.alone()?;
        let mut told = Vec::new();
        let directory = self.directory();
        for (_, agreement) in self.agreements.each()? {
            // The VMs of a group with an unreadable agreement must be reset by hand.
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

/// Tells each scanner which group pays for it.
fn charge(directory: &Path, agreements: &[&Agreement], accounts: &[Account]) {
    for Account { group, payer, .. } in accounts {
        let cgroup =
            agreements.iter().find(|one| one.name == *payer).and_then(|one| one.cgroup.clone());
        let billing = (payer != group).then(|| CpuBilling { group: payer.clone(), cgroup });
        // Compares with the file, because an earlier balancer may have been killed.
        let charged = cpu_billing::read(directory, group).and_then(|now| {
            if now == billing {
                Ok(())
            } else {
                cpu_billing::write(directory, group, billing.as_ref())
            }
        });
        if let Err(error) = charged {
            tracing::warn!(%group, "cannot change which group pays for the scanner: {error}");
        }
    }
}

impl Drop for Balancing {
    /// Charges each scanner to its own group again, because loans are no longer accounted for.
    fn drop(&mut self) {
        if self.lock.is_none() {
            return;
        }
        let directory = self.directory();
        for group in self.tenants.keys() {
            let _ = cpu_billing::write(&directory, group, None);
        }
    }
}
