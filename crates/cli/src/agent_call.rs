//! Calls to this host's agent over its unix socket.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aquifer_api::client::{CallError, Client};
use aquifer_api::path;
use aquifer_api::status::Status;
use clap::Args;
use tokio::runtime::{Builder, Runtime};

use crate::commands::Common;
use crate::failure::{Failure, OrFail, Result};

/// How long an agent may take to tell its status: it asks each volume.
const STATUS_LIMIT: Duration = Duration::from_secs(10);

/// The address of this host's agent.
#[derive(Debug, Clone, Args)]
pub struct Socket {
    /// Unix socket of this host's agent
    ///
    /// The default is agent.sock in --run-dir.
    #[arg(long, value_name = "PATH", env = "AQUIFER_SOCKET")]
    socket: Option<PathBuf>,
}

/// A client of this host's agent, with the reactor that runs its calls.
#[derive(Debug)]
pub struct Agent {
    runtime: Runtime,
    client: Client,
    path: PathBuf,
}

impl Socket {
    /// Returns the socket of a command that has no option for it.
    pub fn of_environment() -> Self {
        Self { socket: std::env::var_os("AQUIFER_SOCKET").map(PathBuf::from) }
    }

    /// Makes a client for the agent behind this socket, and sends nothing yet.
    ///
    /// # Errors
    /// If this process cannot have a reactor.
    pub fn agent(self, common: &Common) -> Result<Agent> {
        let path = self.socket.unwrap_or_else(|| common.run_dir.join("agent.sock"));
        let runtime =
            Builder::new_current_thread().enable_all().build().or_fail(|| "calling the agent")?;
        Ok(Agent { runtime, client: Client::local(&path), path })
    }
}

/// Asks the agent at this socket for its host's status; `None` if it does not answer.
pub fn status_at(socket: &Path) -> Option<Status> {
    let runtime = Builder::new_current_thread().enable_all().build().ok()?;
    let client = Client::local(socket).with_timeout(STATUS_LIMIT);
    runtime.block_on(client.get(path::STATUS)).ok()
}

impl Agent {
    /// Returns whether the agent's socket exists; true if this user may not look.
    pub fn is_there(&self) -> bool {
        self.path.try_exists().unwrap_or(true)
    }

    /// Asks the agent for this host's status.
    ///
    /// # Errors
    /// If the agent does not answer within ten seconds.
    pub fn status(&self, what: &str) -> Result<Status> {
        self.call(what, STATUS_LIMIT, async |client| client.get(path::STATUS).await)
    }

    /// Calls the agent, for a caller that tells errors apart.
    ///
    /// # Errors
    /// See [`CallError`].
    pub fn ask<T, F>(&self, limit: Duration, call: impl FnOnce(Client) -> F) -> Result<T, CallError>
    where
        F: Future<Output = Result<T, CallError>>,
    {
        self.runtime.block_on(call(self.client.clone().with_timeout(limit)))
    }

    /// Calls the agent and waits at most `limit` for its answer.
    ///
    /// # Errors
    /// If the agent does not answer in time, or refuses.
    pub fn call<T, F>(
        &self,
        what: &str,
        limit: Duration,
        call: impl FnOnce(Client) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T, CallError>>,
    {
        self.ask(limit, call).map_err(|error| {
            let help = error.help();
            let failure = Failure::new(what, error);
            match help {
                Some(help) => failure.help(help),
                None => failure,
            }
        })
    }
}
