//! Swap in the pool for as long as a command runs.

use std::time::Duration;

use aquifer_api::order::{Borrow, Borrowed, Return, Returned};
use aquifer_api::path;
use aquifer_page::{Bytes, VolumeId};
use serde::{Deserialize, Serialize};

use crate::agent_call::Agent;
use crate::failure::Result;
use crate::progress::Progress;

/// How long the agent may take to borrow or return: it asks lenders in turn, and swaps back what is left.
const LIMIT: Duration = Duration::from_secs(120);

/// A volume that is swap, and who made it so: what is needed to give it back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Volume {
    /// The agent borrowed it.
    Borrowed(VolumeId),
}

/// Swap in the pool. Given back by [`Pool::release`]; who drops it leaves it on.
#[derive(Debug)]
#[must_use = "the memory stays borrowed until it is released"]
pub struct Pool {
    volume: Volume,
    agent: Agent,
}

impl Pool {
    /// Has the agent borrow `bytes`.
    ///
    /// # Errors
    /// If no agent answers or nobody lends.
    pub fn borrow(agent: Agent, bytes: Bytes) -> Result<Self> {
        let agent = agent.within(LIMIT);
        let _progress = Progress::spinner(format!("borrowing {bytes}"));
        let order = Borrow { bytes };
        let what = format!("borrowing {bytes} for the command");
        let borrowed: Borrowed = agent
            .call(&what, async |client| client.post(path::BORROW, &order).await)
            .map_err(|failure| if agent.is_there() { failure } else { failure.help(NO_POOL) })?;
        Ok(Self { volume: Volume::Borrowed(borrowed.volume), agent })
    }

    /// The volume.
    pub fn volume(&self) -> Volume {
        self.volume
    }

    /// Gives the memory back.
    ///
    /// # Errors
    /// If what other programs swapped to it does not fit into RAM, or the agent is gone.
    pub fn release(self) -> Result<()> {
        match self.volume {
            Volume::Borrowed(volume) => give_back(&self.agent, volume),
        }
    }
}

/// What to do where there is neither an agent nor a lender.
const NO_POOL: &str = "start 'aquifer agent', or name an NBD export with --lender (see 'aquifer export'), \
                       or have no memory in the pool with --remote 0";

/// Has the agent return a volume.
///
/// # Errors
/// If it does not answer, or what is swapped out does not fit into RAM.
pub fn give_back(agent: &Agent, volume: VolumeId) -> Result<()> {
    let _progress = Progress::spinner("giving memory back");
    let order = Return { volume: Some(volume) };
    let returned = agent.call("giving memory back", async |client| client.post(path::RETURN, &order).await);
    returned.map(|_: Returned| ())
}
