//! The balancer's state of one group.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use aquifer_control::group::Surplus;
use aquifer_control::group::overhead::{Account, Reading};
use aquifer_control::group::reprovision::{Plan, Reprovisioner, TargetDecision, Vm, handed};
use aquifer_dedup::{Members, Sharing};
use aquifer_disk_cache::{self as disk_cache, CacheStatus};
use aquifer_page::{Bytes, RegionName};
use aquifer_region::RegionError;
use aquifer_vm::VmError;
use aquifer_vm::memory::Ballooned;
use aquifer_vm::process::{Files, client, side_by_side};

use super::Balanced;
use crate::agreement::Agreement;

/// How long a VM that did not answer is not queried again.
const SILENT: Duration = Duration::from_secs(10);

/// A group's state from earlier periods.
#[derive(Debug)]
pub(super) struct Tenant {
    members: Members,
    /// The last agreement that could be read.
    pub(super) agreement: Agreement,
    reprovisioner: Reprovisioner,
    /// The VMs as last seen.
    vms: BTreeMap<RegionName, Known>,
    /// The group's deficit in the last period.
    short: Bytes,
    /// Size of the disk cache in its last answer.
    cache: Option<Bytes>,
}

#[derive(Clone, Debug)]
struct Known {
    is: Vm,
    /// The size that the VM was last told.
    told: Option<Bytes>,
    /// Bytes that the guest has swapped since it booted, once known.
    swapped: Option<u64>,
    /// Until when the VM counts as silent and is not queried.
    silent_until: Option<Instant>,
}

/// A group's disk cache, as found at the start of a period.
#[derive(Debug)]
pub(super) struct FoundCache {
    /// The cache's status, if there is a cache and it answers.
    pub(super) status: Option<CacheStatus>,
    /// Memory that a silent cache may hold.
    pub(super) withheld: Bytes,
    /// Why the cache does not answer.
    pub(super) silent: Option<String>,
}

impl FoundCache {
    /// Returns whether there is a cache, as far as is known.
    pub(super) fn is_there(&self) -> bool {
        self.status.is_some() || self.silent.is_some()
    }
}

/// A group, as found at the start of a period.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) sharing: Sharing,
    pub(super) vms: Vec<Vm>,
    pub(super) reading: Reading,
    /// VMs that do not answer, and count as last seen.
    pub(super) silent: Vec<RegionName>,
    /// Changes of that, as text.
    pub(super) news: Vec<String>,
}

impl Tenant {
    pub(super) fn new(directory: &Path, agreement: &Agreement) -> Self {
        Self {
            members: Members::new(directory, &agreement.name),
            agreement: agreement.clone(),
            reprovisioner: Reprovisioner::new(agreement.reprovision.clone()),
            vms: BTreeMap::new(),
            short: Bytes::ZERO,
            cache: None,
        }
    }

    /// Reads the group's state; its VMs are queried in parallel.
    pub(super) fn look(&mut self) -> Result<Found, RegionError> {
        self.reprovisioner.set_config(self.agreement.reprovision.clone());
        self.members.look()?;
        let sharers = self.members.sharers();
        let contributed = self.members.contributed(&sharers);
        let vms = self.members.vms();
        let now = Instant::now();
        let asked: Vec<_> = vms.into_iter().map(|vm| (self.vms.remove(vm.name()), vm)).collect();
        let found = side_by_side(asked, |(before, vm)| {
            let contributed = contributed.get(vm.name()).copied().unwrap_or_default();
            (vm.name().clone(), find(&vm, before, contributed, now))
        });
        let mut news = Vec::new();
        self.vms = BTreeMap::new();
        for (vm, (known, new)) in found {
            news.extend(new);
            self.vms.extend(known.map(|known| (vm, known)));
        }
        let vms: Vec<_> = self.vms.values().map(|known| known.is.clone()).collect();
        let silent = self.vms.iter().filter(|(_, known)| known.silent_until.is_some());
        let silent = silent.map(|(vm, _)| vm.clone()).collect();
        let sharing = Sharing::of(&self.members, &sharers);
        let swapped = vms.iter().fold(Bytes::ZERO, |sum, vm| sum.saturating_add(vm.swapped));
        let reading = Reading {
            group: self.agreement.name.clone(),
            consents: self.agreement.lends,
            saved: sharing.saved_bytes,
            handed: handed(&vms),
            swapped,
            short: self.short,
        };
        Ok(Found { sharing, vms, reading, silent, news })
    }

    /// Reads the state of the disk cache. A silent cache counts with its last known size.
    pub(super) fn look_at_cache(&mut self, directory: &Path, saved: Bytes) -> FoundCache {
        match disk_cache::status(directory, &self.agreement.name) {
            Ok(status) => {
                self.cache = status.as_ref().map(|status| status.size);
                FoundCache { status, withheld: Bytes::ZERO, silent: None }
            }
            Err(error) => {
                let withheld = self.cache.unwrap_or(saved);
                FoundCache { status: None, withheld, silent: Some(error.to_string()) }
            }
        }
    }

    /// Decides the sizes of the VMs and the cache; if `act`, also tells them.
    pub(super) fn balance(
        &mut self,
        (run_dir, directory): (&Path, &Path),
        found: Found,
        cache: FoundCache,
        account: Account,
        act: bool,
    ) -> Balanced {
        let surplus = account.surplus();
        // Memory of a silent cache is not handed out.
        let awaited = surplus.awaited.saturating_add(cache.withheld);
        let plan = self.plan(Surplus { awaited, ..surplus }, &found.vms);
        let mut failed = found.news;
        failed.extend(cache.silent.map(|why| format!("the disk cache does not answer: {why}")));
        let mut cache = cache.status;
        if act {
            let size = plan.cache.size;
            let resize = |cache: &mut Option<CacheStatus>, failed: &mut Vec<String>| {
                match disk_cache::resize(directory, &self.agreement.name, size) {
                    Ok(resized) => *cache = resized,
                    Err(error) => {
                        failed.push(format!("cannot resize the disk cache to {size}: {error}"));
                    }
                }
            };
            // The cache shrinks before any VM grows.
            if cache.as_ref().is_some_and(|cache| plan.cache.size < cache.size) {
                resize(&mut cache, &mut failed);
            }
            let has_given = |cache: &CacheStatus| cache.fixed || cache.size <= plan.cache.size;
            failed.extend(tell(
                &mut self.vms,
                run_dir,
                &plan,
                cache.as_ref().is_none_or(has_given),
            ));
            if cache.as_ref().is_some_and(|cache| plan.cache.size > cache.size) {
                resize(&mut cache, &mut failed);
            }
        }
        let Found { sharing, vms, silent, .. } = found;
        Balanced { sharing, account, vms, plan, cache, silent, failed }
    }

    /// Decides the sizes of the VMs.
    fn plan(&mut self, surplus: Surplus, vms: &[Vm]) -> Plan {
        let plan = self.reprovisioner.step(surplus, vms);
        self.short = plan.short;
        plan
    }

    /// Tells the VMs to return to their own sizes; returns those told.
    pub(super) fn tell_own(&mut self, run_dir: &Path, vms: &[Vm]) -> Vec<(RegionName, Bytes)> {
        let more = vms.iter().filter(|vm| vm.size > vm.base);
        let told = side_by_side(more, |vm| {
            let told = client::balloon(&Files::new(run_dir, &vm.vm), Some(vm.base));
            told.is_ok().then(|| (vm.vm.clone(), vm.base))
        });
        told.into_iter().flatten().collect()
    }
}

/// Tells the VMs their sizes: first those that shrink, then, if `may_get`, those that grow. Returns
/// the failures.
fn tell(
    vms: &mut BTreeMap<RegionName, Known>,
    run_dir: &Path,
    plan: &Plan,
    may_get: bool,
) -> Vec<String> {
    let is_told = |decision: &&TargetDecision| {
        let known = vms.get(&decision.vm);
        // A VM that has the size it was told need not hear it again; a silent one would not hear
        // it.
        known.is_some_and(|known| {
            known.silent_until.is_none()
                && (known.is.size != decision.to || decision.from != decision.to)
        })
    };
    let told = plan.decisions.iter().filter(is_told);
    let (give, get): (Vec<_>, Vec<_>) = told.partition(|decision| decision.to < decision.from);
    let mut failed = Vec::new();
    for decisions in [give, if may_get { get } else { Vec::new() }] {
        let told = side_by_side(decisions, |decision| {
            let told = client::balloon(&Files::new(run_dir, &decision.vm), Some(decision.to));
            (decision, told.map(drop))
        });
        for (TargetDecision { vm, to, .. }, told) in told {
            match (told, vms.get_mut(vm)) {
                (Ok(()), Some(known)) => known.told = Some(*to),
                (Ok(()), None) => {}
                (Err(error), _) => {
                    failed.push(format!("cannot set the balloon of {vm} to {to}: {error}"));
                }
            }
        }
    }
    failed
}

/// Reads a VM's state, and says so if it has become silent or answers again. A silent VM counts as
/// last seen, because it still holds its memory. A VM that never answered counts with the most that
/// it may hold.
fn find(
    vm: &Files,
    before: Option<Known>,
    contributed: Bytes,
    now: Instant,
) -> (Option<Known>, Option<String>) {
    let was_silent = before.as_ref().and_then(|before| before.silent_until);
    let as_before = |before: Known, silent_until| Known {
        is: Vm { swapped: Bytes::ZERO, contributed, ..before.is },
        silent_until: Some(silent_until),
        ..before
    };
    if let (Some(before), Some(until)) = (&before, was_silent)
        && until > now
    {
        return (Some(as_before(before.clone(), until)), None);
    }
    let name = vm.name();
    let answer = match client::balloon(vm, None) {
        Ok(answer) => answer,
        // The VM has ended meanwhile.
        Err(VmError::Unknown(_)) => return (None, None),
        Err(error) => {
            let new = was_silent.is_none();
            let new = new.then(|| {
                format!("{name} does not answer, so its last known figures count: {error}")
            });
            let unseen = || client::ballooned_at_most(vm).ok().flatten();
            let unseen = || unseen().map(|most| Known::from(name, &most, None, contributed));
            let known = before.or_else(unseen);
            return (known.map(|known| as_before(known, now + SILENT)), new);
        }
    };
    let new = was_silent.map(|_| format!("{name} answers again"));
    (Some(Known::from(name, &answer, before, contributed)), new)
}

impl Known {
    /// Makes the state of a VM from its answer.
    fn from(name: &RegionName, now: &Ballooned, before: Option<Self>, contributed: Bytes) -> Self {
        let swapped = now.figures.as_ref().map(|figures| figures.swap_in + figures.swap_out);
        let last = before.as_ref().and_then(|before| before.swapped);
        let told = before.and_then(|before| before.told);
        let is = Vm {
            vm: name.clone(),
            base: now.base,
            max: now.max,
            size: now.size,
            target: told.unwrap_or(now.size),
            swapped: Bytes(swapped.zip(last).map_or(0, |(now, last)| now.saturating_sub(last))),
            contributed,
        };
        Self { is, told, swapped: swapped.or(last), silent_until: None }
    }
}

#[cfg(test)]
mod tests;
