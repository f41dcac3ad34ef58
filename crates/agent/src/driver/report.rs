//! The driver's answers to `status`, to `drain`, and to other hosts.

use std::collections::BTreeMap;
use std::time::Duration;

use aquifer_api::Problem;
use aquifer_api::cluster::Summary;
use aquifer_api::order::{Draining, Left};
use aquifer_api::status::{
    AgentProcess, History, HostMemory, LeaseHealth, Ledger, LeftToDrain, Lent, Loans, Membership,
    Peer, Status,
};
use aquifer_control as control;
use aquifer_page::{Bytes, HostName};
use aquifer_vm::process::client;
use tokio::sync::oneshot;

use super::Driver;
use super::reply::contacts;
use crate::cluster::Gossip;
use crate::groups;
use crate::lender::limits;

impl Driver {
    /// Answers with everything about this host. Volumes are other processes, so a blocking thread
    /// asks for their status.
    pub(super) fn report(&self, reply: oneshot::Sender<Status>) {
        let config = &self.parts.config;
        let (controller, memory) = (self.node.controller(), self.node.memory());
        let mut status = Status {
            host: config.host.clone(),
            membership: Membership {
                address: config.listen.to_string(),
                admits: self.parts.gossip.as_ref().is_some_and(Gossip::admits),
                zone: config.zone.clone(),
                certificate: Some(self.parts.renewing.certificate()),
            },
            agent: AgentProcess {
                pid: std::process::id(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                uptime_s: self.now().as_secs_f64(),
            },
            role: controller.role(),
            memory: HostMemory {
                source: self.parts.source.name(),
                total: memory.total,
                used: memory.used,
                swap_used: memory.swap_used,
                upper: memory.total.scaled(config.memory.upper),
                lower: memory.total.scaled(config.memory.lower),
                shareable: controller.shareable(),
                spare: controller.spare(),
                pressure: memory.pressure,
            },
            ledger: ledger(self.node.ledger()),
            draining: None,
            loans: Loans {
                lent: self.lent(),
                borrowed: Vec::new(),
                regions: Vec::new(),
                at_risk: Vec::new(),
                lending_link: self.parts.lender.gate().map(|_| self.pacer.status()),
            },
            scanners: Vec::new(),
            peers: self.peers(),
            history: History {
                decisions: self.parts.journal.decisions(),
                events: self.parts.events.all(),
                role_changes: self.parts.journal.role_changes(),
            },
            period_s: config.memory.period.as_secs_f64(),
        };
        let (borrower, lost) = (self.parts.borrower.clone(), self.node.lost().clone());
        let key_ages = self.node.key_ages();
        let state = config.state.clone();
        let vms = self.node.vacates().then(|| self.parts.vms.clone());
        tokio::task::spawn_blocking(move || {
            let loans = &mut status.loans;
            let leases = loans.lent.len();
            status.draining =
                vms.and_then(|vms| vms.count()).map(|vms| LeftToDrain { vms, leases });
            (loans.borrowed, loans.regions) = (borrower.status(), borrower.regions());
            status.scanners = groups::scanners(&state);
            let held = loans.borrowed.iter_mut().flat_map(|volume| &mut volume.leases);
            let regions = loans.regions.iter_mut().flat_map(|region| &mut region.leases);
            for held in held.chain(regions) {
                held.key_age_s = key_ages.get(&held.lease).map(Duration::as_secs_f64);
                if let Some(copy) = &mut held.copy {
                    copy.first_answers &= !lost.contains(&held.lease);
                    copy.answers &= !lost.contains(&copy.lease);
                }
                if let Some(copy) = &mut held.disk {
                    copy.lender_answers &= !lost.contains(&held.lease);
                }
                if lost.contains(&held.lease) {
                    "lost by its lender".clone_into(&mut held.state);
                    held.health = LeaseHealth::Lost;
                }
            }
            loans.note_risks();
            let _ = reply.send(status);
        });
    }

    /// Answers with what other hosts may know. A blocking thread lists the VMs.
    pub(super) fn summarize(&self, reply: oneshot::Sender<Summary>) {
        let (config, controller) = (&self.parts.config, self.node.controller());
        let lent = controller.lent().into_iter().map(|lent| lent.lease);
        let borrowed = controller.borrowed().into_iter().map(|held| held.lease);
        let mut summary = Summary {
            host: config.host.clone(),
            address: config.listen.to_string(),
            admits: self.parts.gossip.as_ref().is_some_and(Gossip::admits),
            zone: config.zone.clone(),
            certificate: Some(self.parts.renewing.certificate()),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            role: controller.role(),
            ledger: ledger(self.node.ledger()),
            lent: by_host(lent.map(|lease| (lease.borrower, lease.bytes))),
            borrowed: by_host(borrowed.map(|lease| (lease.lender, lease.bytes))),
            vms: None,
            pressure: self.node.memory().pressure,
            draining: self.node.vacates() || (self.node.is_draining() && config.lend.enabled),
        };
        let state = config.state.clone();
        tokio::task::spawn_blocking(move || {
            let vms = client::list(&state).inspect_err(|error| tracing::debug!("{error}"));
            summary.vms = vms.ok().and_then(|vms| u32::try_from(vms.len()).ok());
            let _ = reply.send(summary);
        });
    }

    /// Answers with the progress of a drain. A blocking thread reads the VMs' records, if they are
    /// part of it.
    pub(super) fn draining(&self, vms: bool, reply: oneshot::Sender<Result<Draining, Problem>>) {
        let stored = self.parts.lender.stored_by_lease();
        let left = self.node.left(&stored, &contacts(self.peers())).into_iter().map(|left| Left {
            lease: left.lease,
            borrower: left.borrower,
            bytes: left.bytes,
            why: left.why,
            io_timeout_ms: left.io_timeout_ms,
        });
        let (on, left) = (self.node.vacates(), left.collect());
        let borrows = self.node.controller().volumes().len();
        let (vms, states) = (vms.then(|| self.parts.vms.clone()), self.node.move_states());
        tokio::task::spawn_blocking(move || {
            let vms = vms.map_or(Ok(Vec::new()), |vms| vms.left(&states));
            reply.send(vms.map(|vms| Draining { on, left, vms, borrows }))
        });
    }

    /// Returns the latest results of calls to peers, and to former peers that still share leases.
    fn peers(&self) -> Vec<Peer> {
        let former = self.node.former_peers();
        self.parts.peers.status_with(|host| former.contains(host))
    }

    fn lent(&self) -> Vec<Lent> {
        let now = self.now();
        let (connections, stored) =
            (self.parts.lender.connections(), self.parts.lender.stored_by_lease());
        let traffic = limits::traffic(self.parts.lender.gate().as_deref());
        let status = |lent: control::LentStatus| Lent {
            traffic: traffic.get(&lent.lease.lease).cloned(),
            lease: lent.lease.lease,
            borrower: lent.lease.borrower,
            region: lent.lease.owner.into(),
            group: lent.lease.group,
            capacity: lent.lease.bytes,
            goes_first: lent.lease.goes_first,
            stored: stored.get(&lent.lease.lease).copied().unwrap_or_default(),
            connections: connections
                .as_ref()
                .map(|all| all.get(&lent.lease.lease).copied().unwrap_or_default()),
            state: lent.state,
            silent_s: now.saturating_sub(lent.seen).as_secs_f64(),
        };
        self.node.controller().lent().into_iter().map(status).collect()
    }
}

fn by_host(leases: impl Iterator<Item = (HostName, Bytes)>) -> BTreeMap<HostName, Bytes> {
    let mut sums: BTreeMap<HostName, Bytes> = BTreeMap::new();
    for (host, bytes) in leases {
        let sum = sums.entry(host).or_default();
        *sum = sum.saturating_add(bytes);
    }
    sums
}

/// Converts a ledger to the API's type.
fn ledger(ledger: control::ledger::Ledger) -> Ledger {
    let control::ledger::Ledger {
        total,
        reserved,
        vm_floor,
        vm_elastic,
        cache_floor,
        group_surplus,
        lent,
        mirror,
        free,
        overcommitted,
    } = ledger;
    Ledger {
        total,
        reserved,
        vm_floor,
        vm_elastic,
        cache_floor,
        group_surplus,
        lent,
        mirror,
        free,
        overcommitted,
    }
}
