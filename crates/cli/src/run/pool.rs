//! Swap in the pool for as long as a command runs.

use std::time::Duration;

use aquifer_api::order::{Borrow, Borrowed, Return, Returned};
use aquifer_api::path;
use aquifer_blockdev::BackendKind;
use aquifer_page::{Bytes, VolumeId};
use serde::{Deserialize, Serialize};

use crate::agent_call::Agent;
use crate::failure::Result;
use crate::lenders::Lenders;
use crate::progress::Progress;
use crate::run::watch::Place;
use crate::volumes::{Owner, Volumes, Wish};

/// How long the agent may take to borrow or return: it asks lenders in turn, and swaps back pages.
const LIMIT: Duration = Duration::from_secs(120);

/// The remedy if there is neither an agent nor a lender.
const NO_POOL: &str = "start 'aquifer serve agent', name an export with --lender (see 'aquifer \
                       serve export'), or do without the pool (--remote 0)";

/// A swap volume, with its maker: all that is needed to give it back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Volume {
    /// The agent borrowed it.
    Borrowed(VolumeId),
    /// This command attached it.
    Attached(VolumeId),
}

/// Memory in the pool that is swap.
#[derive(Debug)]
pub struct RunMemory {
    /// The volume to give back.
    pub volume: Volume,
    /// The place where its process answers.
    pub place: Place,
}

/// The source of swap in the pool.
#[derive(Debug)]
pub struct Pool {
    /// This host's agent, whether it runs or not.
    pub agent: Agent,
    /// The volumes of this host.
    pub volumes: Volumes,
}

impl Pool {
    /// Orders the agent to borrow `bytes` and to swap to it at this priority.
    ///
    /// # Errors
    /// If no agent answers, or if no host lends.
    pub fn borrow(&self, bytes: Bytes, priority: u16) -> Result<RunMemory> {
        let _progress = Progress::spinner(format!("borrowing {bytes}"));
        let order = Borrow { bytes, priority: Some(priority) };
        let what = format!("borrowing {bytes} for the command");
        let borrowed =
            self.agent.call(&what, LIMIT, async |client| client.post(path::BORROW, &order).await);
        let borrowed: Borrowed = borrowed.map_err(|failure| {
            if self.agent.is_there() { failure } else { failure.help(NO_POOL) }
        })?;
        let place = Place { state: borrowed.state, volume: borrowed.volume };
        Ok(RunMemory { volume: Volume::Borrowed(borrowed.volume), place })
    }

    /// Swaps to lenders' exports at this priority; `io_timeout` is the timeout of their I/O.
    ///
    /// # Errors
    /// If they cannot be attached.
    pub fn attach(
        &self,
        lenders: &Lenders,
        priority: u16,
        io_timeout: Duration,
    ) -> Result<RunMemory> {
        let wish = Wish { backend: BackendKind::Auto, swap: Some(priority), io_timeout };
        let record = self.volumes.attach(lenders, wish, Owner::Run(std::process::id()))?;
        let place = Place { state: record.spec.state, volume: record.spec.volume };
        Ok(RunMemory { volume: Volume::Attached(place.volume), place })
    }

    /// Gives a volume back; does nothing if it is gone.
    ///
    /// A borrowed volume stays if there is no agent: the next agent takes care of it.
    ///
    /// # Errors
    /// If the pages that other programs swapped to it do not fit into RAM, or if the agent refuses.
    pub fn release(&self, volume: Volume) -> Result<()> {
        match volume {
            Volume::Borrowed(volume) if self.agent.is_there() => {
                let _progress = Progress::spinner("giving memory back");
                let order = Return { volume: Some(volume) };
                let returned = self.agent.call("giving memory back", LIMIT, async |client| {
                    client.post(path::RETURN, &order).await
                });
                returned.map(|_: Returned| ())
            }
            Volume::Borrowed(_) => Ok(()),
            Volume::Attached(volume) => {
                let is_there =
                    self.volumes.all()?.iter().any(|found| found.record.spec.volume == volume);
                if is_there { self.volumes.detach(volume) } else { Ok(()) }
            }
        }
    }
}
