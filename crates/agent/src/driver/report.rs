//! The driver's answer to `status`.

use aquifer_api::status::{HostMemory, LeaseHealth, Lent, Status};
use aquifer_control as control;
use tokio::sync::oneshot;

use super::Driver;
use super::perform::role;

impl Driver {
    /// Answers with everything about this host. Volumes are other processes, so a blocking thread
    /// asks for their status.
    pub(super) fn report(&self, reply: oneshot::Sender<Status>) {
        let config = &self.parts.config;
        let former = self.former_peers();
        let mut status = Status {
            host: config.host.clone(),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_s: self.started.elapsed().as_secs_f64(),
            role: role(self.controller.role()),
            memory: HostMemory {
                source: self.parts.source.name(),
                total: self.memory.total,
                used: self.memory.used,
                swap_used: self.memory.swap_used,
                upper: self.memory.total.scaled(config.memory.upper),
                lower: self.memory.total.scaled(config.memory.lower),
                shareable: self.controller.shareable(),
                spare: self.controller.spare(),
                pressure: self.memory.pressure,
            },
            lent: self.lent(),
            borrowed: Vec::new(),
            peers: self.parts.peers.status_with(|host| former.contains(host)),
            decisions: self.decisions.iter().cloned().collect(),
            events: self.parts.events.all(),
            role_changes: self.role_changes.iter().copied().collect(),
            period_s: config.memory.period.as_secs_f64(),
        };
        let (borrower, lost) = (self.parts.borrower.clone(), self.lost.clone());
        tokio::task::spawn_blocking(move || {
            status.borrowed = borrower.status();
            let held = status.borrowed.iter_mut().flat_map(|volume| &mut volume.leases);
            for held in held.filter(|held| lost.contains(&held.lease)) {
                "lost by its lender".clone_into(&mut held.state);
                held.health = LeaseHealth::Lost;
            }
            let _ = reply.send(status);
        });
    }

    fn lent(&self) -> Vec<Lent> {
        let now = self.started.elapsed();
        let (connections, stored) =
            (self.parts.lender.connections(), self.parts.lender.stored_by_lease());
        let status = |lent: control::LentStatus| Lent {
            lease: lent.lease.lease,
            borrower: lent.lease.borrower,
            group: lent.lease.group,
            capacity: lent.lease.bytes,
            stored: stored.get(&lent.lease.lease).copied().unwrap_or_default(),
            connections: connections
                .as_ref()
                .map(|all| all.get(&lent.lease.lease).copied().unwrap_or_default()),
            state: state(lent.state).to_owned(),
            silent_s: now.saturating_sub(lent.seen).as_secs_f64(),
        };
        self.controller.lent().into_iter().map(status).collect()
    }
}

fn state(state: control::LoanState) -> &'static str {
    match state {
        control::LoanState::Opening => "opening",
        control::LoanState::Offered => "offered",
        control::LoanState::Held => "held",
        control::LoanState::Recalled => "asked back",
        control::LoanState::Freeing => "freeing",
    }
}
