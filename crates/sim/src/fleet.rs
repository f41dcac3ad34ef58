//! All VMs: the hosts that they are on, and their moves.

use aquifer_page::RegionName;

use crate::Moves;
use crate::event::HostNumber;
use crate::machine::Machine;

/// All VMs.
#[derive(Debug)]
pub(crate) struct Fleet {
    /// The VMs on each host, by their numbers.
    on: Vec<Vec<usize>>,
    names: Vec<RegionName>,
    /// On how many hosts each VM is.
    places: Vec<usize>,
    pub(crate) moves: Moves,
}

impl Fleet {
    pub(crate) fn new(names: Vec<RegionName>, hosts: usize) -> Self {
        let vms = names.len();
        let moves = Moves { total: vms, ..Moves::default() };
        Self { on: vec![Vec::new(); hosts], places: vec![0; vms], names, moves }
    }

    /// Takes the VMs that a host has now. Returns those that are new there, or gone.
    pub(crate) fn take(&mut self, host: HostNumber, machine: &Machine) -> Vec<usize> {
        let now = machine.vms.values().map(|vm| vm.number);
        if now.clone().eq(self.on[host].iter().copied()) {
            return Vec::new();
        }
        let before = std::mem::replace(&mut self.on[host], now.collect());
        before.iter().for_each(|vm| self.places[*vm] -= 1);
        self.on[host].iter().for_each(|vm| self.places[*vm] += 1);
        before.into_iter().chain(self.on[host].iter().copied()).collect()
    }

    /// Returns the first of these VMs that is not on exactly one host, and on how many it is.
    pub(crate) fn astray(&self, vms: &[usize]) -> Option<(RegionName, usize)> {
        let vm = vms.iter().copied().find(|vm| self.places[*vm] != 1)?;
        Some((self.names[vm].clone(), self.places[vm]))
    }
}
