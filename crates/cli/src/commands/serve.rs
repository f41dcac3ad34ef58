//! `aquifer serve`: the programs that run until a signal ends them.

mod agent;
mod dedup;
mod disk_cache;
mod export;
mod manuals;
pub(super) mod region;
mod reprovision;
mod turns;
pub(super) mod vm;
mod vm_balancer;
pub(super) mod volume;

use std::process::ExitCode;

use clap::{Args, Subcommand};

pub(super) use agent::CONFIG;
pub(super) use dedup::saved;
pub(super) use disk_cache::text as cache_text;
pub(super) use manuals::{MANUAL, MANUALS};

use super::Common;
use crate::failure::Result;

/// Run a service of this host in the foreground
///
/// Each service runs until a signal ends it. An agent can do the work of 'reprovision' and
/// 'vm-balancer' too, if its configuration says so.
#[derive(Debug, Args)]
pub struct Serve {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Agent(agent::Agent),
    Export(Box<export::Export>),
    Dedup(dedup::Dedup),
    Reprovision(reprovision::Reprovision),
    DiskCache(disk_cache::DiskCache),
    VmBalancer(vm_balancer::VmBalancer),
}

impl Serve {
    /// Runs the service.
    ///
    /// # Errors
    /// If it cannot start, or a step of it fails.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        match self.what {
            What::Agent(agent) => return agent.run(common),
            What::Export(export) => return export.run(common),
            What::Dedup(dedup) => dedup.run(common)?,
            What::Reprovision(reprovision) => reprovision.run(common)?,
            What::DiskCache(cache) => cache.run(common)?,
            What::VmBalancer(balancer) => balancer.run(common)?,
        }
        Ok(ExitCode::SUCCESS)
    }
}
