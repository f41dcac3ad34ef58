//! `aquifer host undrain`.

use std::process::ExitCode;
use std::time::Duration;

use aquifer_api::order::{Drain as Order, Draining, VmLeftState};
use aquifer_api::path;
use clap::Args;

use crate::agent_call::Socket;
use crate::commands::Common;
use crate::failure::Result;
use crate::manual::Manual;
use crate::output;

/// End the drain of this host
///
/// The host lends and takes VMs again, as its configuration says. No further VM moves away. The
/// agent cancels the move in progress, and the VM stays, unless the other host owns it already.
/// Recalls that have started still finish.
#[derive(Debug, Args)]
pub struct Undrain {
    #[command(flatten)]
    socket: Socket,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[("aquifer host undrain", "Put this host back into service")],
    see_also: &["aquifer-host-drain(1)", "aquifer-status(1)"],
    ..Manual::NONE
};

/// How long the agent may take to answer.
const LIMIT: Duration = Duration::from_secs(10);

impl Undrain {
    /// Ends the drain.
    ///
    /// # Errors
    /// If the agent does not answer.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let agent = self.socket.agent(common)?;
        let order = Order { on: false };
        let left: Draining = agent.call("ending the drain", LIMIT, async |client| {
            client.post(path::DRAIN, &order).await
        })?;
        output::answer(common.json, &left, text)?;
        Ok(ExitCode::SUCCESS)
    }
}

fn text(left: &Draining) -> String {
    let moving = left.vms.iter().find(|vm| vm.state == VmLeftState::Moves);
    let cancelled = moving.map(|vm| {
        format!("; the move of VM {} is cancelled, unless the other host owns it already", vm.vm)
    });
    format!(
        "the drain is over: this host lends and takes VMs again{}",
        cancelled.unwrap_or_default()
    )
}
