//! VMs with borrowed memory: what the agent looks for in their records, and their starts.

use std::collections::BTreeSet;
use std::time::Duration;

use aquifer_control::node::{Answer, Found, Input};
use aquifer_control::{LiveVolume, RegionRequest};
use aquifer_page::{Group, HostName, VolumeId};
use rand::RngExt as _;

use crate::event::HostNumber;
use crate::host::Host;
use crate::machine::{Progress, Standing, Vm};
use crate::simulation::Simulation;

/// The pause after a VM's request for memory that brought nothing.
const START_AGAIN: Duration = Duration::from_secs(15);

impl Simulation {
    /// Returns the volumes of regions that are gone without a record.
    pub(super) fn gone(&self, host: HostNumber) -> Vec<VolumeId> {
        let Some(agent) = &self.hosts[host].agent else { return Vec::new() };
        let volumes = &self.hosts[host].machine.volumes;
        let known = agent.known.regions.iter().copied();
        let mut gone: Vec<_> = known.filter(|volume| !volumes.contains_key(volume)).collect();
        if !gone.is_empty() {
            let moved = self.moved(host);
            gone.retain(|volume| !moved.iter().any(|(known, _)| known == volume));
        }
        gone
    }

    /// Returns the volumes of regions that are on other hosts now, by the records here.
    pub(super) fn moved(&self, host: HostNumber) -> Vec<(VolumeId, HostName)> {
        let machine = &self.hosts[host].machine;
        let name = |to: HostNumber| self.hosts[to].name.clone();
        let left =
            machine.moving.gone.values().filter_map(|gone| Some((gone.volume?, name(gone.to))));
        let handed_over = machine.moving.leaving.values().filter_map(|leaving| {
            let vm = machine.vms.get(&leaving.vm)?;
            let is_handed_over = leaving.progress == Progress::HandedOver;
            is_handed_over.then_some((vm.volume?, name(leaving.to)))
        });
        left.chain(handed_over).collect()
    }

    /// Returns the regions of this host that its agent does not know.
    pub(super) fn arrived(&self, host: HostNumber) -> Vec<LiveVolume> {
        let Host { agent, machine, .. } = &self.hosts[host];
        let Some(agent) = agent else { return Vec::new() };
        let new = machine.regions().filter(|(id, _)| agent.known.expected.contains(id));
        new.map(|(id, volume)| volume.live(id)).collect()
    }

    /// Returns the volumes of regions that the agent expects and that do not come.
    pub(super) fn missed(&self, host: HostNumber) -> Vec<VolumeId> {
        let Host { agent, machine, .. } = &self.hosts[host];
        let Some(agent) = agent.as_ref().filter(|agent| !agent.known.expected.is_empty()) else {
            return Vec::new();
        };
        let memory = machine.moving.awaited.values().filter_map(|awaited| awaited.memory.as_ref());
        let mut comes: BTreeSet<_> = memory.map(|(volume, _)| *volume).collect();
        comes.extend(machine.regions().map(|(volume, _)| volume));
        agent.known.expected.difference(&comes).copied().collect()
    }

    /// Lets the agent know what it has found.
    pub(super) fn note_found(&mut self, host: HostNumber, found: &Found) {
        let Some(agent) = &mut self.hosts[host].agent else { return };
        for live in &found.arrived {
            agent.known.expected.remove(&live.volume);
            agent.known.regions.insert(live.volume);
        }
        found.missed.iter().for_each(|volume| _ = agent.known.expected.remove(volume));
    }

    /// Asks for memory for the VMs that wait for it.
    pub(super) fn start_vms(&mut self, host: HostNumber) {
        let Host { agent: Some(agent), machine, .. } = &mut self.hosts[host] else { return };
        let waits = |vm: &&Vm| vm.standing == Standing::Starts;
        let waiting = machine.vms.values().filter(waits).find(|vm| {
            let name = &vm.spec.name;
            !agent.starting.values().any(|starting| starting == name)
        });
        let Some(vm) = waiting.filter(|_| agent.starting.is_empty() && self.now >= agent.starts_at)
        else {
            return;
        };
        let region = vm.spec.name.clone();
        let (bytes, ticket) = (vm.spec.size, agent.ticket());
        agent.starting.insert(ticket, region.clone());
        let volume = VolumeId(self.rng.random());
        let least = bytes;
        let request = RegionRequest { region, volume, bytes, least, group: Group::default() };
        self.input(host, Input::BorrowFor { request, ticket });
    }

    /// Takes the answer to a request for a VM. If it gets no memory, its owner tries again later.
    pub(super) fn answer_to_start(&mut self, host: HostNumber, answer: &Answer) {
        let pause = match answer {
            Answer::Provided(_) => Duration::ZERO,
            _ => START_AGAIN,
        };
        if let Some(agent) = &mut self.hosts[host].agent {
            agent.starts_at = self.now + pause;
        }
    }
}
