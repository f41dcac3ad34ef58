//! VMs that move: one agent offers a VM, and the other starts a supervisor that waits for it. The
//! two supervisors do the rest.
//!
//! - `asking`: the question to a host whether it takes a VM.
//! - `moving`: the moves that this agent decides on. `left`: what is still here.

mod asking;
mod left;
mod moving;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use aquifer_api::message::{Arrive, Awaits};
use aquifer_api::order::{Awaited, Migrate};
use aquifer_api::{Problem, Threshold};
use aquifer_control::Offer;
use aquifer_control::ledger::{Claim, Purpose};
use aquifer_group::Agreements;
use aquifer_page::{Bytes, Group, HostName, RegionName, lock};
use aquifer_region::process::{RegionSpec, preload_library};
use aquifer_vm::definition::Definitions;
use aquifer_vm::migrate::{self, Arrival};
use aquifer_vm::process::{Files, client};

use crate::agreements::Passing;
use crate::config::Config;
use crate::driver::{Command, Handle};
use crate::peers::{AskError, Peers};
use asking::Offered;
use moving::Moving;

/// The agent's part in moving VMs.
#[derive(Clone, Debug)]
pub struct Vms(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: Config,
    /// The program that supervises VMs.
    exe: PathBuf,
    peers: Peers,
    passing: Passing,
    agent: Handle,
    moving: Moving,
    /// The VMs for which this host prepares.
    preparing: Mutex<BTreeSet<RegionName>>,
}

fn problem(error: impl std::fmt::Display) -> Problem {
    Problem { error: error.to_string(), help: None }
}

impl Vms {
    /// Serves VMs with files in this agent's state directory.
    pub(crate) fn new(
        config: &Config,
        exe: PathBuf,
        (peers, passing): (Peers, Passing),
        agent: Handle,
    ) -> Self {
        let (config, (moving, preparing)) = (config.clone(), Default::default());
        Self(Arc::new(Inner { config, exe, peers, passing, agent, moving, preparing }))
    }

    /// Starts to wait for a VM that another host is about to move here.
    ///
    /// # Errors
    /// If this host takes no VMs, `from` is no peer, this host or the group has no room, or the
    /// supervisor cannot start.
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
        let Some(preparing) = Preparing::begin(&self.0, arrival.memory.name.clone()) else {
            let vm = &arrival.memory.name;
            return Err(problem(format!("this host prepares for VM '{vm}' already")));
        };
        // It ends also if the caller hangs up, so that no two prepare for one VM.
        let vms = self.clone();
        let prepared = tokio::spawn(async move {
            let _preparing = preparing;
            vms.prepare(from, arrival, arrive.below).await
        });
        prepared.await.map_err(problem)?
    }

    async fn prepare(
        &self,
        from: HostName,
        arrival: Arrival,
        below: Option<Threshold>,
    ) -> Result<Awaits, Problem> {
        let RegionSpec { name: vm, group, .. } = arrival.memory.clone();
        if group != Group::default() {
            self.0.passing.agree_with(&from, &group).await?;
        }
        let sender = from.clone();
        let claim = Claim {
            name: vm.clone(),
            purpose: Purpose::Cache,
            group,
            bytes: arrival.room(),
            reserve: arrival.limits.reserve,
        };
        let agent = &self.0.agent;
        agent.ask(|reply| Command::TakeVm { from: sender, claim, below, reply }).await??;
        let received = self.expect(from.clone(), arrival).await;
        if let Err(Problem { error, .. }) = &received
            // An earlier attempt may wait for this VM, and keeps the promise.
            && !self.waits_for(&vm)
        {
            agent.tell(Command::LostVm { from, vm, why: error.clone() }).await;
        }
        received
    }

    /// Expects the VM's region, and starts to wait. From then on, this host does not deny that it
    /// holds the region's leases.
    async fn expect(&self, from: HostName, mut arrival: Arrival) -> Result<Awaits, Problem> {
        let (memory, agent) = (Box::new(arrival.memory), &self.0.agent);
        let (vm, volume) = (memory.name.clone(), memory.volume);
        let again = memory.clone();
        arrival.memory = agent.ask(|reply| Command::Expect { memory, reply }).await??;
        let inner = self.0.clone();
        let received = tokio::task::spawn_blocking(move || inner.receive(from, arrival)).await;
        let received = received.map_err(problem).flatten();
        if received.is_ok() {
            // The end of an earlier attempt may have made the agent no longer expect the region.
            agent.ask(|reply| Command::Expect { memory: again, reply }).await??;
        }
        // An earlier attempt may wait for this VM.
        if received.is_err() && !self.waits_for(&vm) {
            agent.tell(Command::Miss { volume }).await;
        }
        received
    }

    fn waits_for(&self, vm: &RegionName) -> bool {
        let all = client::list(&self.0.config.state);
        all.is_ok_and(|all| all.iter().any(|files| files.name() == vm))
    }

    /// Asks a peer to wait for a VM of this host: the one that the order names, or else the one
    /// that can spare most and takes the VM.
    ///
    /// # Errors
    /// If there is no such VM, or no peer can take it.
    pub async fn offer(&self, order: Migrate) -> Result<Awaited, Problem> {
        let wanted = Wanted { avoid: None, below: Threshold::Upper };
        Ok(self.offer_to(order, wanted).await?.0)
    }

    /// Does the same for a host as `wanted`; also returns the reason for the choice.
    ///
    /// # Errors
    /// [`AskError::Refused`] if no host has changed anything.
    async fn offer_to(
        &self,
        order: Migrate,
        wanted: Wanted,
    ) -> Result<(Awaited, String), AskError> {
        let Inner { config, .. } = &*self.0;
        let refused = AskError::Refused;
        if order.to.as_ref() == Some(&config.host) {
            let here = format!("VM '{}' is on host {} already", order.vm, config.host);
            return Err(refused(problem(here)));
        }
        let files = Files::new(&config.state, &order.vm);
        let offered = tokio::task::spawn_blocking(move || client::offer(&files)).await;
        let offered = offered.map_err(problem).and_then(|offered| offered.map_err(problem));
        let mut arrival = offered.map_err(refused)?;
        if let Some(cache) = order.cache {
            check_place(&arrival, cache).map_err(refused)?;
            arrival.memory.cache = cache;
        }
        let (migration, cache) = (arrival.migration, arrival.room());
        let memory = arrival.memory.clone();
        let arrival = serde_json::to_value(arrival).map_err(problem).map_err(refused)?;
        let below = order.to.is_none().then_some(wanted.below);
        let vm = Offered::new(Arrive { arrival, below }, &memory);
        let (to, Awaits { address, defined }, why) = match order.to {
            Some(to) => {
                let awaits = self.0.ask(&to, &vm).await?;
                (to, awaits, "an operator chose it".to_owned())
            }
            None => self.0.place(&order.vm, cache, &vm, wanted.avoid).await?,
        };
        Ok((Awaited { to, migration, address, identity: config.tls.clone(), defined }, why))
    }
}

/// Refuses a cache beside which the VM's other pages would have no place.
fn check_place(arrival: &Arrival, cache: Bytes) -> Result<(), Problem> {
    let Arrival { vm, memory, size, .. } = arrival;
    let leased = memory.leased();
    if cache >= *size || leased >= memory.size {
        return Ok(());
    }
    let name = &vm.name;
    Err(Problem {
        error: format!("VM '{name}' has {leased} at lenders, too little beside a cache of {cache}"),
        help: Some(format!(
            "omit --cache, or first borrow with 'aquifer region resize {name} --cache {cache}'"
        )),
    })
}

/// The host that may take a VM.
#[derive(Clone, Debug)]
struct Wanted {
    /// A host that must not take it.
    avoid: Option<HostName>,
    /// Up to where the host may use its memory then.
    below: Threshold,
}

/// A VM for which this host prepares.
struct Preparing(Arc<Inner>, RegionName);

impl Preparing {
    /// Begins to prepare; `None` if this host does so already.
    fn begin(inner: &Arc<Inner>, vm: RegionName) -> Option<Self> {
        let is_first = lock(&inner.preparing).insert(vm.clone());
        is_first.then(|| Self(inner.clone(), vm))
    }
}

impl Drop for Preparing {
    fn drop(&mut self) {
        lock(&self.0.preparing).remove(&self.1);
    }
}

/// Returns the hosts that can spare `cache` and those that cannot, each with most room first.
fn by_room(mut offers: Vec<Offer>, cache: Bytes) -> (Vec<Offer>, Vec<Offer>) {
    offers.sort_by(|a, b| (b.spare, &a.host).cmp(&(a.spare, &b.host)));
    offers.into_iter().partition(|offer| offer.spare >= cache)
}

fn room(Offer { host, spare, .. }: &Offer) -> String {
    match *spare {
        Bytes::ZERO => format!("{host} drains or has no room"),
        spare => format!("{host} can spare {spare}"),
    }
}

/// Explains the choice of the host that made this offer.
fn chosen(offer: &Offer, others: &[String]) -> String {
    match others.is_empty() {
        true => format!("{}, and no other host was asked", room(offer)),
        false => format!("{}. The others: {}", room(offer), others.join("; ")),
    }
}

impl Inner {
    /// Finds a host for a VM, other than `avoid`. Only a host that surely does not wait for the VM
    /// is left for the next one.
    async fn place(
        &self,
        name: &RegionName,
        cache: Bytes,
        vm: &Offered,
        avoid: Option<HostName>,
    ) -> Result<(HostName, Awaits, String), AskError> {
        let lenders: BTreeSet<_> = vm.lenders().collect();
        let failed = avoid.iter().map(|host| format!("{host}: the last move there failed"));
        let lends = lenders.iter().map(|host| format!("{host} lends some of the VM's memory"));
        let mut others: Vec<_> = failed.chain(lends).collect();
        let mut asked: BTreeSet<_> = avoid.into_iter().chain(lenders).collect();
        loop {
            let offers = self.peers.rooms((cache, vm.below()), &asked).await;
            let (fitting, small) = by_room(offers, cache);
            if fitting.is_empty() {
                others.extend(small.iter().map(room));
                break;
            }
            for (place, offer) in fitting.iter().enumerate() {
                let host = &offer.host;
                match self.ask(host, vm).await {
                    Ok(awaits) => {
                        others.extend(fitting[place + 1..].iter().chain(&small).map(room));
                        return Ok((host.clone(), awaits, chosen(offer, &others)));
                    }
                    Err(AskError::Refused(refusal)) => {
                        others.push(format!("{host}: {}", refusal.error));
                    }
                    Err(lost) => return Err(lost),
                }
                asked.insert(host.clone());
            }
        }
        let why = match others.is_empty() {
            true => "no other host answers".to_owned(),
            false => others.join("; "),
        };
        Err(AskError::Refused(Problem {
            error: format!("no host takes VM '{name}', whose cache may take {cache}: {why}"),
            help: Some("name a host with --to, or a smaller cache with --cache".to_owned()),
        }))
    }

    fn receive(&self, from: HostName, mut arrival: Arrival) -> Result<Awaits, Problem> {
        let Config { listen, state, tls, vms, groups, .. } = &self.config;
        let memory = &arrival.memory;
        if let Some(agreement) =
            Agreements::of(&groups.agreements).to_join(&memory.group).map_err(problem)?
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
            cpu: arrival.cpu.clone(),
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
            let (fitting, small) = by_room(offers.clone(), Bytes::gib(gib));
            let names = |offers: Vec<Offer>| {
                offers.iter().map(|offer| offer.host.to_string()).collect::<Vec<_>>().concat()
            };
            (names(fitting), names(small))
        };
        let split = |fitting: &str, small: &str| (fitting.to_owned(), small.to_owned());
        assert_eq!(hosts(2), split("abd", "c"));
        assert_eq!(hosts(3), split("ab", "dc"));
        assert_eq!(hosts(5), split("", "abdc"));
    }
}
