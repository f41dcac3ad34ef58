//! The daemon: watches a host's memory, borrows and lends memory, and answers peers and the
//! operator.
//!
//! - [`config`]: the configuration. [`config_reference`]: its keys, for the docs.
//! - [`monitor`]: total and used memory.
//! - [`driver`]: the one task that owns the node of the `control` crate, which decides, and carries
//!   out what it says.
//! - [`lender`], [`borrower`], [`peers`]: lent memory, borrowed memory, and the other hosts.
//! - [`cluster`]: the cluster that this host belongs to, and how a host joins it.
//! - [`events`]: events outside the controller's decisions. `stopping`: how an agent ends.
//! - `definitions`: the start of defined VMs.
//! - [`vms`]: VMs that move. [`groups`]: their agreements, their scanners, and the hand-out of the
//!   memory that they save.
//! - `agreements`: how groups' agreements get to other hosts.
//! - `own`: the memory that this host promises to its own VMs, regions, groups and exports.
//! - [`http`]: the API. [`access`]: which people may use it.
//!
//! The agent is not on the swap path: volumes are processes of their own. The agent serves the
//! pages that it lends from files that outlive it.

pub mod access;
mod agreements;
mod alarm;
mod background;
mod balancing;
pub mod borrower;
pub mod cluster;
pub mod config;
pub mod config_reference;
mod contacts;
mod definitions;
pub mod driver;
pub mod events;
pub mod groups;
pub mod http;
pub mod lender;
pub mod monitor;
mod own;
pub mod peers;
mod stopping;
mod sys;
pub mod vms;
mod wire;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use aquifer_transport::tls::TlsError;
use tokio::sync::mpsc;

use agreements::Passing;
use borrower::Borrower;
use cluster::{Admission, ClusterDir, Gossip, Hearing, Leaving, Renewing, Revoking};
use config::{Config, ConfigError};
use driver::{Driver, Handle, Journal, Parts};
use events::Events;
use groups::Groups;
use lender::Lender;
use monitor::Source;
use monitor::gate::SwapGate;
use monitor::pressure::Pressure;
use own::OwnReader;
use peers::Peers;
use stopping::Signals;
use vms::Vms;

/// The reasons for an agent not to start, or not to end cleanly.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The agent refuses the configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The host's certificate or key cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The certificate belongs to another host.
    #[error(
        "{dir} holds the certificate of '{certificate}', \
         but the configuration is for '{configured}'"
    )]
    OtherHost {
        /// Directory of the certificate.
        dir: String,
        /// The host that the certificate names.
        certificate: String,
        /// The host that the configuration names.
        configured: String,
    },
    /// The operator forced the end while borrowers had pages here; the text lists them.
    #[error(
        "the agent stopped at once, but still held {0}: to lose nothing, start an agent again \
         before their io_timeout ends"
    )]
    Forced(String),
    /// A resource that the agent needs is missing or in use.
    #[error("{0}")]
    Start(String),
}

fn start_error(error: impl std::fmt::Display) -> AgentError {
    AgentError::Start(error.to_string())
}

/// Runs an agent until a signal stops it. On SIGINT the agent first recalls lent memory and returns
/// borrowed memory. On SIGTERM it leaves leases and volumes to the next agent, as an upgrade or a
/// restart needs. `exe` is the program that serves volumes.
///
/// # Errors
/// If the agent cannot start, or a second SIGINT forces its end.
pub fn run(config: Config, exe: PathBuf) -> Result<(), AgentError> {
    for rule in &aquifer_blockdev::safety::protect_agent().0 {
        if let Some(failed) = &rule.failed {
            tracing::warn!(
                "the agent lacks a protection for when memory is short ('{}'): {failed}",
                rule.rule
            );
        }
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("agent")
        .enable_all()
        .build()
        .map_err(start_error)?;
    runtime.block_on(serve(config, exe))
}

async fn serve(config: Config, exe: PathBuf) -> Result<(), AgentError> {
    let cluster = ClusterDir::new(&config.cluster);
    let identity = cluster::open_identity(&config, &cluster)?;
    if *identity.host() != config.host {
        return Err(AgentError::OtherHost {
            dir: config.tls.display().to_string(),
            certificate: identity.host().to_string(),
            configured: config.host.to_string(),
        });
    }
    let cgroup = config.memory.cgroup.as_deref();
    let source = Source::open(cgroup).map_err(start_error)?;
    let pressure = Pressure::open(cgroup, config.memory.pressure);
    let gate = cgroup
        .filter(|_| config.memory.gate_swap)
        .map(SwapGate::new)
        .transpose()
        .map_err(start_error)?;
    // Bind the socket first: it keeps a second agent from taking the first one's leases.
    let started = Gossip::start(&cluster, &config, &identity).await;
    let (gossip, mut started) = started.map_err(AgentError::Start)?.unzip();
    // A host that wants to join has no certificate yet.
    let tls = match &gossip {
        Some(_) => identity.admitting_config(),
        None => identity.server_config(),
    };
    let endpoints = http::bind((&config.socket, &config.access), config.listen, tls)
        .await
        .map_err(start_error)?;
    let lender = Arc::new(Lender::open(&config, &identity).map_err(AgentError::Start)?);
    let events = Events::default();
    let mut former = contacts::former(&config.state, &config.peers);
    let peers = Peers::new(
        &config.host,
        &config.peers,
        former.clone(),
        &identity.client_config(),
        events.clone(),
    );
    if let Some(started) = &mut started {
        peers.follow(&started.others());
    }
    let (commands, inbox) = mpsc::channel(64);
    let handle = Handle(commands);
    let state = config.state.clone();
    // A QEMU may answer late.
    let cleared = tokio::task::spawn_blocking(move || aquifer_vm::process::clear_arrivals(&state));
    if let Ok(Err(error)) = cleared.await {
        tracing::warn!("cannot remove what is left of VMs that did not arrive: {error}");
    }
    let journal = Journal::default();
    let passing = Passing::new(&config, peers.clone(), gossip.clone(), journal.clone());
    let vms = Vms::new(&config, exe.clone(), (peers.clone(), passing.clone()), handle.clone());
    let balances = config.vms.balance;
    let balancer = balances.then(|| {
        balancing::start(&config.state, &exe, &config.vms.balancer, journal.clone(), handle.clone())
    });
    let _balancer = balancer.transpose().map_err(start_error)?;
    let starter =
        definitions::Starter::new(&config, &exe, (events.clone(), journal.clone()), handle.clone());
    let groups = Groups::new(&config.groups);
    let hands_out = config.groups.balance.then(|| groups.balance(&config.state, journal.clone()));
    let _hands_out = hands_out.transpose().map_err(start_error)?;
    let helpers = groups.serve(&exe, &config.state, journal.clone());
    let _helpers = helpers.map_err(start_error)?;
    let borrower =
        Arc::new(Borrower::open(&config, exe, peers.clone()).map_err(AgentError::Start)?);
    let mut signals = Signals::new()?;
    let lenders = borrower.leases_by_lender();
    former.retain(|host, _| lender.borrowers().contains(host) || lenders.contains_key(host));
    if let Err(error) = contacts::keep(&config.state, &config.peers, &former) {
        let state = config.state.display();
        tracing::warn!(
            "cannot record the addresses of peers in {state}, which former peers need: {error}"
        );
    }

    tracing::info!(
        host = %config.host, peers = peers.known().len(), memory = %source.name(),
        listen = %config.listen, pages = %lender.place(), socket = %config.socket.display(),
        "ready"
    );
    let contact = tokio::spawn({
        let peers = peers.clone();
        async move { peers.keep_in_contact().await }
    });
    let gossiping = started
        .map(|started| tokio::spawn(started.run(peers.clone(), events.clone(), handle.clone())));
    let passes = tokio::spawn(passing.clone().run());
    let admission = Admission::new(&config, peers.clone(), gossip.clone(), identity.clone());
    let renewing = Renewing::new(&config, identity.clone(), peers.clone(), admission.clone());
    // Nobody signs where there is no cluster to join.
    let renews = gossip.is_some().then(|| tokio::spawn(renewing.clone().run()));
    let tls = identity.listening_config();
    let acts = (handle.clone(), admission.clone());
    let revoking = Revoking::new(identity, cluster.clone(), peers.clone(), gossip.clone(), acts);
    let revokes = tokio::spawn(revoking.clone().run());
    let hearing = Hearing {
        dir: cluster.clone(),
        peers: peers.clone(),
        revoking: revoking.clone(),
        admission: admission.clone(),
        tls,
    };
    let hears = tokio::spawn(hearing.run());
    let leaving = Leaving::new(cluster, peers.clone(), gossip.clone(), handle.clone(), vms.clone());
    let others = peers.clone();
    // Before the first period: from then on this host lends.
    let own = OwnReader::open(&config.state, &source).await;
    let driver = Driver::new(Parts {
        config,
        source,
        pressure,
        gate,
        lender,
        borrower,
        peers,
        gossip: gossip.clone(),
        renewing,
        events,
        journal,
        own,
        vms: vms.clone(),
    });
    let driver = tokio::spawn(driver.run(inbox));
    let served = http::Served {
        handle: handle.clone(),
        peers: others,
        vms,
        groups,
        passing,
        admission,
        revoking,
        leaving: leaving.clone(),
    };
    let server = tokio::spawn(endpoints.serve(served));
    // Now: a VM that starts asks this agent for memory.
    let _starts = starter.start().map_err(start_error)?;
    let stopped = tokio::select! {
        stopped = signals.wait(&handle) => stopped,
        () = leaving.wait() => {
            // Until the answer is on its way.
            tokio::time::sleep(Duration::from_millis(200)).await;
            Ok(())
        }
    };
    if let Some(gossip) = gossip {
        gossip.leave(false).await;
    }
    gossiping.inspect(tokio::task::JoinHandle::abort);
    contact.abort();
    passes.abort();
    revokes.abort();
    hears.abort();
    renews.inspect(tokio::task::JoinHandle::abort);
    server.abort();
    let _ = server.await;
    driver.abort();
    let _ = driver.await;
    stopped
}
