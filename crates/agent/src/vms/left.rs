//! The VMs that are still on this host, and why.

use std::collections::BTreeMap;

use aquifer_api::Problem;
use aquifer_api::order::{VmLeft, VmLeftState};
use aquifer_control::node::{MoveState, Obstacle, VmReading};
use aquifer_page::{Bytes, RegionName};
use aquifer_region::process::{Files, client};
use aquifer_vm::process::{self, Standing, side_by_side};

use super::moving::Underway;
use super::{Vms, problem};

impl Vms {
    /// Returns the VMs of this host, by their records.
    ///
    /// # Errors
    /// If the VMs cannot be listed.
    fn standings(&self) -> Result<Vec<Standing>, Problem> {
        let state = &self.0.config.state;
        process::standings(state).map_err(problem)
    }

    /// Returns the number of VMs on this host; `None` if they cannot be listed.
    pub(crate) fn count(&self) -> Option<usize> {
        Some(self.standings().ok()?.len())
    }

    /// Returns the VMs of this host that may have memory at lenders.
    ///
    /// # Errors
    /// If the VMs cannot be listed.
    pub(crate) fn with_leases(&self) -> Result<Vec<RegionName>, Problem> {
        let regions = self.0.config.state.join("regions");
        let is_whole = |vm: &Standing| {
            let record = client::record(&Files::new(&regions, &vm.name));
            matches!(vm.obstacle, Some(Obstacle::LocalMemory | Obstacle::Adopted))
                || record.is_ok_and(|region| region.leases.is_empty())
        };
        let leased = self.standings()?.into_iter().filter(|vm| !is_whole(vm));
        Ok(leased.map(|vm| vm.name).collect())
    }

    /// Returns the VMs of this host, each with what the engine of its memory tells; none if they
    /// cannot be listed.
    pub(crate) fn readings(&self) -> Vec<VmReading> {
        self.read().unwrap_or_else(|problem| {
            tracing::warn!("no VM moves: {}", problem.error);
            Vec::new()
        })
    }

    fn read(&self) -> Result<Vec<VmReading>, Problem> {
        let read = |Standing { name, obstacle, arrived }| {
            let reading =
                |obstacle, dirty| VmReading { vm: name.clone(), obstacle, dirty, arrived };
            match obstacle {
                Some(_) => reading(obstacle, Bytes::ZERO),
                None => match process::dirty(&self.0.config.state, &name) {
                    Ok(dirty) => reading(None, dirty),
                    Err(obstacle) => reading(Some(obstacle), Bytes::ZERO),
                },
            }
        };
        Ok(side_by_side(self.standings()?, read))
    }

    /// Returns the VMs that a drain has left here, with the latest decisions about them.
    ///
    /// # Errors
    /// If the VMs cannot be listed.
    pub(crate) fn left(
        &self,
        states: &BTreeMap<RegionName, MoveState>,
    ) -> Result<Vec<VmLeft>, Problem> {
        let left = |VmReading { vm, obstacle, .. }| {
            let state = states.get(&vm).cloned();
            left(vm, obstacle, state, || self.0.moving.underway())
        };
        Ok(self.read()?.into_iter().map(left).collect())
    }
}

/// Describes one VM by its record and the latest decision.
fn left(
    vm: RegionName,
    obstacle: Option<Obstacle>,
    state: Option<MoveState>,
    underway: impl FnOnce() -> Underway,
) -> VmLeft {
    let (state, why) = match (state, obstacle) {
        (Some(MoveState::Moves), _) => {
            let Underway { to, phase, sent } = underway();
            let why = if to.is_some() { phase } else { "asking for a host".to_owned() };
            return VmLeft { vm, state: VmLeftState::Moves, why, to, sent };
        }
        (_, Some(obstacle)) if obstacle.passes() => (VmLeftState::Waits, obstacle.to_string()),
        (_, Some(obstacle)) => (VmLeftState::Stays, obstacle.to_string()),
        (Some(MoveState::Refused(why)), None) => {
            (VmLeftState::Waits, format!("this host tries again: {why}"))
        }
        (Some(MoveState::Failed(why)), None) => {
            (VmLeftState::Waits, format!("this host tries again: its last move failed: {why}"))
        }
        (None, None) => (VmLeftState::Waits, "waits for its turn".to_owned()),
    };
    VmLeft { vm, state, why, to: None, sent: Bytes::ZERO }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_stays_only_if_no_wait_would_help() {
        let shown = |obstacle: Option<Obstacle>, state: Option<MoveState>| {
            let vm = "web".parse().expect("a name");
            let VmLeft { state, why, .. } = left(vm, obstacle, state, Underway::default);
            (state, why)
        };
        let (moves, waits, stays) = (VmLeftState::Moves, VmLeftState::Waits, VmLeftState::Stays);
        let b = || "b".parse().expect("a name");
        assert_eq!(shown(None, None), (waits, "waits for its turn".to_owned()));
        let asks = (moves, "asking for a host".to_owned());
        assert_eq!(shown(None, Some(MoveState::Moves)), asks);
        assert_eq!(shown(Some(Obstacle::HandedOver(b())), Some(MoveState::Moves)), asks);
        assert_eq!(shown(Some(Obstacle::LocalMemory), None).0, stays);
        assert_eq!(shown(Some(Obstacle::Arrives(b())), None).0, waits);
        let refused = MoveState::Refused("no room".to_owned());
        assert_eq!(
            shown(None, Some(refused)),
            (waits, "this host tries again: no room".to_owned())
        );
        let failed = MoveState::Failed("lost".to_owned());
        assert_eq!(
            shown(None, Some(failed)),
            (waits, "this host tries again: its last move failed: lost".to_owned())
        );
    }
}
