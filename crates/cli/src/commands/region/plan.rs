//! A region that is about to be made, with the memory that this host's agent borrowed for it.

use std::path::PathBuf;
use std::time::Duration;

use aquifer_api::client::CallError;
use aquifer_api::order::{BorrowFor, Provided, Settle};
use aquifer_api::{Done, path};
use aquifer_page::Bytes;
use aquifer_region::process::RegionSpec;
use aquifer_volume::LeaseTarget;

use super::directory;
use crate::agent_call::{Agent, Socket};
use crate::commands::Common;
use crate::failure::{Failure, OrFail as _, Result};

/// How long the agent may take: it asks lenders one after the other.
const LIMIT: Duration = Duration::from_secs(120);

/// How long the agent may take to note that a region exists.
const NOTING: Duration = Duration::from_secs(30);

/// A region that is about to be made.
#[derive(Debug)]
pub(crate) struct Plan {
    spec: RegionSpec,
    /// The agent, if it borrowed the region's memory.
    agent: Option<Agent>,
    json: bool,
}

impl Plan {
    /// Plans a region that needs nothing from this host's agent.
    pub(super) fn new(spec: RegionSpec) -> Self {
        Self { spec, agent: None, json: false }
    }

    /// Lets this host's agent borrow all of the region's memory. `encrypt` sets the encryption of a
    /// lease.
    pub(super) fn with_agent(
        common: &Common,
        socket: Socket,
        spec: RegionSpec,
        encrypt: impl Fn(&mut LeaseTarget),
    ) -> Result<Self> {
        let (agent, leases, identity) = borrow(common, socket, &spec, spec.size)?;
        let mut plan = Self { spec, agent: Some(agent), json: common.json };
        plan.spec.leases = leases;
        plan.spec.leases.iter_mut().for_each(encrypt);
        plan.spec.identity = Some(identity);
        Ok(plan)
    }

    /// Makes the region with `make`, and tells the agent that borrowed its memory. If the agent no
    /// longer holds that memory, `remove` removes the region. An agent that does not answer finds
    /// the region by itself.
    ///
    /// # Errors
    /// If `make` fails, or the agent no longer holds the memory.
    pub(crate) fn make<T>(
        mut self,
        make: impl FnOnce(&RegionSpec) -> Result<T>,
        remove: impl FnOnce(),
    ) -> Result<T> {
        let made = make(&self.spec)?;
        match self.settle(true) {
            Ok(()) => Ok(made),
            Err(error @ CallError::Refused { .. }) => {
                remove();
                Err(self.failure(error))
            }
            Err(error) => {
                let help = "the agent finds the region by itself, within a minute";
                self.failure(error).help(help).warn(self.json);
                Ok(made)
            }
        }
    }

    /// Tells the agent whether the region exists, once.
    fn settle(&mut self, exists: bool) -> Result<(), CallError> {
        let Some(agent) = self.agent.take() else { return Ok(()) };
        let order = Settle { volume: self.spec.volume, exists };
        agent
            .ask(NOTING, async |client| client.post(path::REGION_SETTLE, &order).await)
            .map(|Done {}| ())
    }

    fn failure(&self, error: CallError) -> Failure {
        let help = error.help();
        let failure = Failure::new(format!("keeping the memory of '{}'", self.spec.name), error);
        help.into_iter().fold(failure, Failure::help)
    }
}

/// Lets this host's agent borrow for a region. Returns the agent, the leases, and the
/// directory of the host's certificate.
///
/// # Errors
/// If the agent does not answer, or gets too little memory.
pub(super) fn borrow(
    common: &Common,
    socket: Socket,
    spec: &RegionSpec,
    bytes: Bytes,
) -> Result<(Agent, Vec<LeaseTarget>, PathBuf)> {
    let what = format!("borrowing {bytes} for '{}'", spec.name);
    let agent = socket.agent(common)?;
    let order = BorrowFor {
        region: spec.name.clone(),
        volume: spec.volume,
        bytes,
        group: spec.group.clone(),
        directory: directory(common)?,
    };
    let borrow = async |client: aquifer_api::client::Client| {
        client.post::<_, Provided>(path::REGION_BORROW, &order).await
    };
    let provided = agent.call(&what, LIMIT, borrow);
    let Provided { leases, identity } = provided.map_err(or_by_hand)?;
    Ok((agent, serde_json::from_value(leases).or_fail(|| what)?, identity))
}

/// Adds the other way out to a failure to borrow.
fn or_by_hand(failure: Failure) -> Failure {
    let by_hand = "name lenders with --lender";
    let help = failure.help.as_ref().map(|help| format!("{help}; or {by_hand}"));
    failure.help(help.unwrap_or_else(|| by_hand.to_owned()))
}

impl Drop for Plan {
    /// Returns the memory of a region that does not exist.
    fn drop(&mut self) {
        if let Err(error) = self.settle(false) {
            let help = "the agent finds within a minute that the region does not exist";
            self.failure(error).help(help).warn(self.json);
        }
    }
}
