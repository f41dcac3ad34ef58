//! The orders of operators.

use std::collections::BTreeSet;

use aquifer_control::node::Input;
use aquifer_page::HostName;

use crate::Command;
use crate::event::HostNumber;
use crate::simulation::Simulation;

impl Simulation {
    pub(crate) fn obey(&mut self, number: usize) {
        let crate::Order { host, command, .. } = self.scenario.orders[number];
        match command {
            Command::Part(other) if other != host => _ = self.hosts[host].parted.insert(other),
            Command::Join => self.hosts[host].parted.clear(),
            _ => {}
        }
        if let Command::Vacate(on) = command {
            return self.obey_vacate(host, on);
        }
        let stored = self.hosts[host].machine.stored();
        let peers = self.peers(host);
        let Some(agent) = &mut self.hosts[host].agent else { return };
        let ticket = agent.ticket();
        let input = match command {
            Command::Borrow(bytes) => Input::Borrow { bytes, priority: None, ticket },
            Command::Return => Input::Return { volume: None, ticket },
            Command::RotateKeys => Input::RotateKeys { lease: None, ticket },
            Command::Drain(on) => Input::Drain { on, stored, vms: false },
            Command::Part(_) | Command::Join | Command::Vacate(_) => Input::Peers(peers),
        };
        self.hosts[host].note(self.now, format!("gets the order {command:?}"));
        self.input(host, input);
    }

    fn obey_vacate(&mut self, host: HostNumber, on: bool) {
        if self.hosts[host].agent.is_some() {
            self.hosts[host].note(self.now, format!("gets the order to drain: {on}"));
            self.vacate(host, on);
        }
    }

    /// Returns the hosts that this host counts as peers.
    pub(super) fn peers(&self, host: HostNumber) -> BTreeSet<HostName> {
        let parted = &self.hosts[host].parted;
        let others = self.names.iter().filter(|(_, other)| **other != host);
        others.filter(|(_, other)| !parted.contains(other)).map(|(name, _)| name.clone()).collect()
    }

    /// Gives an order now.
    pub fn order(&mut self, host: usize, command: Command) {
        let at = self.now;
        self.scenario.orders.push(crate::Order { at, host, command });
        let number = self.scenario.orders.len() - 1;
        self.agenda.enter(at, crate::event::Event::Order(number));
    }
}
