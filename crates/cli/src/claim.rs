//! The question to this host's agent whether its memory has room for a VM, a region or an export.

use std::time::Duration;

use aquifer_api::client::CallError;
use aquifer_api::order::Claim;
use aquifer_api::{Done, path};
use aquifer_page::Bytes;
use clap::Args;

use crate::agent_call::{Agent, Socket};
use crate::commands::Common;
use crate::failure::{Failure, Result};

/// How long an agent may take to answer. It decides without I/O.
const LIMIT: Duration = Duration::from_secs(5);

/// The option against the agent's refusal.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Overcommit {
    /// Promise the memory even if this host's agent has no room for it
    ///
    /// The agent counts what this host has promised to VMs, regions and borrowers ('aquifer
    /// status'). Without an agent nothing counts it.
    #[arg(long)]
    overcommit: bool,
}

/// Memory that the agent, if one runs, has promised. The promise ends with the drop of this, unless
/// the command has succeeded.
#[derive(Debug)]
pub(crate) struct Claimed(Option<(Agent, Claim)>);

impl Overcommit {
    /// Asks the agent to promise this memory. Without an agent there is nothing to ask.
    ///
    /// # Errors
    /// If the agent refuses; the failure has its numbers and the ways out.
    pub(crate) fn claim(
        self,
        common: &Common,
        socket: &Socket,
        what: &str,
        claim: Claim,
    ) -> Result<Claimed> {
        let agent = socket.clone().agent(common)?;
        if !agent.is_there() {
            return Ok(Claimed(None));
        }
        let claim = Claim { overcommit: self.overcommit, ..claim };
        match send(&agent, &claim) {
            Ok(Done {}) => Ok(Claimed(Some((agent, claim)))),
            Err(error @ CallError::Refused { .. }) => {
                let failure = Failure::new(what, &error);
                Err(error.help().into_iter().fold(failure, Failure::help))
            }
            // A dead agent leaves its socket.
            Err(CallError::Unreachable { .. } | CallError::Denied { .. }) => Ok(Claimed(None)),
            Err(error) => {
                Failure::new(what, format!("going on without the agent's promise: {error}"))
                    .warn(common.json);
                Ok(Claimed(None))
            }
        }
    }
}

impl Claimed {
    /// Keeps the promise: the agent's next readings show what it is for.
    pub(crate) fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        if let Some((agent, claim)) = self.0.take() {
            // If the agent does not hear this, the claim ends by itself.
            let _ = send(&agent, &Claim { bytes: Bytes::ZERO, ..claim });
        }
    }
}

fn send(agent: &Agent, claim: &Claim) -> Result<Done, CallError> {
    agent.ask(LIMIT, async |client| client.post(path::CLAIM, claim).await)
}
