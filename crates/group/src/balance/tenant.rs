//! One group.

use std::collections::BTreeMap;
use std::path::Path;

use aquifer_control::group::Surplus;
use aquifer_control::group::overhead::Reading;
use aquifer_control::group::reprovision::{Plan, Reprovisioner, Verdict, Vm, handed};
use aquifer_guest::GuestError;
use aquifer_guest::process::{Files, client};
use aquifer_page::{Bytes, RegionName};
use aquifer_region::RegionError;

use crate::agreement::Agreement;
use crate::member::Members;
use crate::scan::Sharing;

/// What is known of a group from the periods before.
#[derive(Debug)]
pub(super) struct Tenant {
    members: Members,
    reprovisioner: Reprovisioner,
    /// Its VMs as they were last found.
    vms: BTreeMap<RegionName, Known>,
    /// What its surplus lacked in the last period.
    short: Bytes,
}

#[derive(Clone, Debug)]
struct Known {
    is: Vm,
    /// What it was last told to have.
    told: Option<Bytes>,
    /// What it has swapped since it booted, once it has said so.
    swapped: Option<u64>,
}

/// What a period finds of a group.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) sharing: Sharing,
    pub(super) vms: Vec<Vm>,
    pub(super) reading: Reading,
}

impl Tenant {
    pub(super) fn new(directory: &Path, agreement: &Agreement) -> Self {
        Self {
            members: Members::new(directory, &agreement.name),
            reprovisioner: Reprovisioner::new(agreement.reprovision.clone()),
            vms: BTreeMap::new(),
            short: Bytes::ZERO,
        }
    }

    /// How it is now.
    pub(super) fn look(&mut self, agreement: &Agreement) -> Result<Found, RegionError> {
        self.reprovisioner.set_config(agreement.reprovision.clone());
        self.members.look()?;
        let sharers = self.members.sharers();
        let contributed = self.members.contributed(&sharers);
        let mut known = BTreeMap::new();
        for vm in self.members.all.iter().filter_map(|member| member.vm()) {
            let contributed = contributed.get(vm.name()).copied().unwrap_or_default();
            let before = self.vms.remove(vm.name());
            known.extend(find(&vm, before, contributed).map(|found| (vm.name().clone(), found)));
        }
        self.vms = known;
        let vms: Vec<_> = self.vms.values().map(|known| known.is.clone()).collect();
        let sharing = Sharing::of(&self.members, &sharers);
        let swapped = vms.iter().fold(Bytes::ZERO, |sum, vm| sum.saturating_add(vm.swapped));
        let reading = Reading {
            group: agreement.name.clone(),
            consents: agreement.lends,
            saved: sharing.saved_bytes,
            handed: handed(&vms),
            swapped,
            short: self.short,
        };
        Ok(Found { sharing, vms, reading })
    }

    /// What its VMs are to have.
    pub(super) fn plan(&mut self, surplus: Surplus, vms: &[Vm]) -> Plan {
        let plan = self.reprovisioner.step(surplus, vms);
        self.short = plan.short;
        plan
    }

    /// Tells its VMs, those first that give. What could not be told, and why.
    pub(super) fn tell(&mut self, run_dir: &Path, vms: &[Vm], plan: &Plan) -> Vec<String> {
        let gives = |verdict: &&Verdict| verdict.to < verdict.from;
        let first = plan.verdicts.iter().filter(gives);
        let then = plan.verdicts.iter().filter(|verdict| !gives(verdict));
        let told = first.chain(then).map(|verdict| {
            let Verdict { vm, to, .. } = verdict;
            // One that has what it was told to have need not hear it again.
            if vms.iter().any(|one| one.vm == *vm && one.size == *to) && verdict.from == *to {
                return Ok(());
            }
            client::balloon(&Files::new(run_dir, vm), Some(*to))
                .map_err(|error| format!("{vm} is not told to have {to}: {error}"))?;
            if let Some(known) = self.vms.get_mut(vm) {
                known.told = Some(*to);
            }
            Ok(())
        });
        told.filter_map(Result::err).collect()
    }

    /// Tells its VMs to have what is their own. Who was told what.
    pub(super) fn tell_own(&mut self, run_dir: &Path, vms: &[Vm]) -> Vec<(RegionName, Bytes)> {
        let more = vms.iter().filter(|vm| vm.size > vm.base);
        let told = more.filter(|vm| client::balloon(&Files::new(run_dir, &vm.vm), Some(vm.base)).is_ok());
        told.map(|vm| (vm.vm.clone(), vm.base)).collect()
    }
}

/// How a VM is now; as it was, if it does not answer: what it holds it does not give back by being silent.
fn find(vm: &Files, before: Option<Known>, contributed: Bytes) -> Option<Known> {
    let now = match client::balloon(vm, None) {
        Ok(now) => now,
        Err(error) => {
            if !matches!(error, GuestError::Unknown(_)) {
                tracing::debug!(vm = %vm.name(), "does not answer: {error}");
            }
            return before
                .map(|before| Known { is: Vm { swapped: Bytes::ZERO, contributed, ..before.is }, ..before });
        }
    };
    let swapped = now.figures.map(|figures| figures.swap_in + figures.swap_out);
    let last = before.as_ref().and_then(|before| before.swapped);
    let told = before.and_then(|before| before.told);
    let is = Vm {
        vm: vm.name().clone(),
        base: now.base,
        max: now.max,
        size: now.size,
        target: told.unwrap_or(now.size),
        swapped: Bytes(swapped.zip(last).map_or(0, |(now, last)| now.saturating_sub(last))),
        contributed,
    };
    Some(Known { is, told, swapped: swapped.or(last) })
}
