//! VMs that move: one agent offers a VM, and the other starts a supervisor that waits for it. The
//! two supervisors do the rest.

use std::path::PathBuf;
use std::sync::Arc;

use aquifer_api::message::{Arrive, Awaits};
use aquifer_api::order::{Awaited, Migrate};
use aquifer_api::{Problem, path};
use aquifer_control::Offer;
use aquifer_group::Agreements;
use aquifer_page::{Bytes, HostName, RegionName};
use aquifer_region::process::{RegionSpec, preload_library};
use aquifer_vm::definition::Definitions;
use aquifer_vm::migrate::{self, Arrival};
use aquifer_vm::process::{Files, client};

use crate::borrower;
use crate::config::Config;
use crate::peers::{AskError, Peers};

/// The agent's part in moving VMs.
#[derive(Clone, Debug)]
pub struct Vms(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: Config,
    /// The program that supervises VMs.
    exe: PathBuf,
    peers: Peers,
}

fn problem(error: impl std::fmt::Display) -> Problem {
    Problem { error: error.to_string(), help: None }
}

impl Vms {
    /// Serves VMs with files in this agent's state directory.
    pub fn new(config: Config, exe: PathBuf, peers: Peers) -> Self {
        Self(Arc::new(Inner { config, exe, peers }))
    }

    /// Starts to wait for a VM that another host is about to move here.
    ///
    /// # Errors
    /// If this host takes no VMs, `from` is no peer, the group has no room, or the supervisor
    /// cannot start.
    pub async fn receive(&self, from: HostName, arrive: Arrive) -> Result<Awaits, Problem> {
        let Inner { config, .. } = &*self.0;
        if !config.vms.accept {
            return Err(Problem {
                error: format!("host {} accepts no VMs from other hosts", config.host),
                help: Some(
                    "set 'accept = true' under [vms] in its configuration, and restart its agent"
                        .to_owned(),
                ),
            });
        }
        if !self.0.peers.knows(&from) {
            return Err(problem(format!("{from} is not a peer of host {}", config.host)));
        }
        let arrival: Arrival = serde_json::from_value(arrive.arrival).map_err(problem)?;
        let inner = self.0.clone();
        let received = tokio::task::spawn_blocking(move || inner.receive(from, arrival));
        received.await.map_err(problem)?
    }

    /// Asks a peer to wait for a VM of this host: the one that the order names, or else the one
    /// that can spare most and takes the VM.
    ///
    /// # Errors
    /// If there is no such VM, or no peer can take it.
    pub async fn offer(&self, order: Migrate) -> Result<Awaited, Problem> {
        let Inner { config, peers, .. } = &*self.0;
        if order.to.as_ref() == Some(&config.host) {
            return Err(problem(format!("VM '{}' is on host {} already", order.vm, config.host)));
        }
        let mut arrival = client::offer(&Files::new(&config.state, &order.vm)).map_err(problem)?;
        refuse_lent(&arrival.memory)?;
        arrival.memory.cache = order.cache.unwrap_or(arrival.memory.cache);
        let (migration, cache) = (arrival.migration, arrival.memory.cache);
        let arrive = Arrive { arrival: serde_json::to_value(arrival).map_err(problem)? };
        let (to, Awaits { address, defined }) = match order.to {
            Some(to) => {
                let awaits = peers.ask(&to, path::ARRIVE, &arrive).await?;
                (to, awaits)
            }
            None => self.0.place(&order.vm, cache, &arrive).await?,
        };
        Ok(Awaited { to, migration, address, identity: config.tls.clone(), defined })
    }
}

/// Refuses a VM whose memory is in leases of this host: lenders serve them to no other host.
fn refuse_lent(memory: &RegionSpec) -> Result<(), Problem> {
    let Some(lease) = memory.leases.iter().find(|lease| borrower::is_borrowed(lease)) else {
        return Ok(());
    };
    let (vm, lender) = (&memory.name, &lease.lender);
    Err(Problem {
        error: format!("VM '{vm}' has memory at {lender} that only this host may use"),
        help: Some("only VMs that name their lenders ('vm start --lender') can move".to_owned()),
    })
}

/// Returns the hosts that can spare `cache`, those that can spare most first.
fn by_room(offers: Vec<Offer>, cache: Bytes) -> Vec<Offer> {
    let mut fitting: Vec<_> = offers.into_iter().filter(|offer| offer.spare >= cache).collect();
    fitting.sort_by(|a, b| (b.spare, &a.host).cmp(&(a.spare, &b.host)));
    fitting
}

impl Inner {
    /// Finds a host for a VM. Only a host that surely does not wait for the VM is left for the
    /// next one.
    async fn place(
        &self,
        vm: &RegionName,
        cache: Bytes,
        arrive: &Arrive,
    ) -> Result<(HostName, Awaits), Problem> {
        let mut reasons = Vec::new();
        for Offer { host, .. } in by_room(self.peers.rooms(cache).await, cache) {
            match self.peers.ask(&host, path::ARRIVE, arrive).await {
                Ok(awaits) => return Ok((host, awaits)),
                Err(AskError::Refused(refusal)) => {
                    reasons.push(format!("{host}: {}", refusal.error))
                }
                Err(AskError::Lost(lost)) => return Err(lost),
            }
        }
        let why = match reasons.is_empty() {
            true => format!("none can spare {cache} for its cache"),
            false => reasons.join("; "),
        };
        Err(Problem {
            error: format!("no host takes VM '{vm}': {why}"),
            help: Some("name a host with --to, or a smaller cache with --cache".to_owned()),
        })
    }

    fn receive(&self, from: HostName, mut arrival: Arrival) -> Result<Awaits, Problem> {
        let Config { listen, state, tls, vms, groups, .. } = &self.config;
        let memory = &arrival.memory;
        if let Some(agreement) =
            Agreements::of(&groups.agreements).find(&memory.group).map_err(problem)?
        {
            agreement.join(&state.join("regions"), &memory.name, memory.size).map_err(problem)?;
        }
        arrival.vm.preload = preload_library(&self.exe).map_err(problem)?;
        arrival.vm.qemu.clone_from(&vms.qemu);
        arrival.memory.identity = arrival.memory.identity.map(|_| tls.clone());
        let incoming = migrate::Incoming {
            migration: arrival.migration,
            from,
            listen: listen.ip(),
            identity: tls.clone(),
            prepared: false,
            left_at_source: None,
        };
        let definitions = Definitions::of(&vms.dir);
        let address = client::receive(&self.exe, state, &arrival, incoming, &definitions);
        let address = address.map_err(problem)?;
        tracing::info!(vm = %arrival.vm.name, %address, "waiting for the VM to arrive");
        Ok(Awaits { address, defined: arrival.definition.is_some() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_goes_to_the_host_with_most_room_if_its_cache_fits() {
        let offer = |(host, gib): (&str, u64)| Offer::new(host.parse().unwrap(), Bytes::gib(gib));
        let offers = [("d", 2), ("b", 4), ("c", 1), ("a", 4)].map(offer).to_vec();
        let hosts = |gib| {
            let fitting = by_room(offers.clone(), Bytes::gib(gib)).into_iter();
            fitting.map(|offer| offer.host.to_string()).collect::<Vec<_>>().concat()
        };
        assert_eq!((hosts(2), hosts(3), hosts(5)), ("abd".into(), "ab".into(), String::new()));
    }
}
