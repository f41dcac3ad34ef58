//! `aquifer vm migrate`.

use std::path::Path;
use std::time::Duration;

use aquifer_api::order::{self, Awaited};
use aquifer_api::path;
use aquifer_vm::migrate::{Mode, Order, Report};
use aquifer_vm::process::{Files, client};
use aquifer_page::{Bytes, HostName, RegionName};
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::agent_call::Socket;
use crate::commands::Common;
use crate::failure::{OrFail, Result};
use crate::output;
use crate::progress::Progress;

/// Moves a VM to another host while it runs
///
/// Returns when it runs there and all of it is there. Until it runs there ctrl-C, and whatever goes wrong, leaves it here as it was.
#[derive(Debug, Args)]
pub struct Migrate {
    /// The VM
    name: RegionName,
    /// The host, a peer of this one
    #[arg(long, value_name = "HOST", required_unless_present = "cancel")]
    to: Option<HostName>,
    /// Has a VM stay that another 'vm migrate' is moving just now
    #[arg(long, conflicts_with = "to")]
    cancel: bool,
    /// How its memory goes over
    #[arg(long, value_name = "MODE", default_value = "instant")]
    mode: ModeName,
    /// Bytes a second that are sent at most, 1MiB or more; as many as go, unless told
    #[arg(long, value_name = "SIZE", value_parser = bandwidth)]
    bandwidth: Option<Bytes>,
    /// For how long the VM may stand still at most, as far as that can be foreseen
    #[arg(long, value_name = "TIME", default_value = "300ms", value_parser = humantime::parse_duration)]
    max_downtime: Duration,
    /// Fails where that would be exceeded, as the VM writes to its memory faster than it goes over: otherwise the VM runs there first then, and what is
    /// missing comes after it
    #[arg(long)]
    no_postcopy: bool,
    /// What its local cache is to be there; as large as here, unless told
    #[arg(long, value_name = "SIZE")]
    cache: Option<Bytes>,
    #[command(flatten)]
    socket: Socket,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ModeName {
    /// What is dirty goes to the pool while the VM runs, and to the other host when it stands still
    Instant,
    /// What is in the local cache goes to the other host while the VM runs, round by round
    Precopy,
    /// The VM runs there first; what is dirty comes after it, what it waits for before all else. It needs both hosts until all has come
    Postcopy,
}

/// Parses the bandwidth. Below the least, each side would run into its timeout.
fn bandwidth(text: &str) -> std::result::Result<Bytes, String> {
    let bandwidth: Bytes = text.parse().map_err(|error| format!("{error}"))?;
    let least = Bytes::mib(1);
    if bandwidth < least { Err(format!("the least is {least}")) } else { Ok(bandwidth) }
}

/// How long the agents may take to prepare the destination.
const LIMIT: Duration = Duration::from_secs(70);

#[derive(Debug, Serialize)]
struct Moved {
    vm: RegionName,
    to: HostName,
    #[serde(flatten)]
    report: Report,
}

impl Migrate {
    pub(super) fn run(self, common: &Common, run_dir: &Path) -> Result<()> {
        let vm = self.name;
        let files = Files::new(run_dir, &vm);
        let Some(to) = self.to else {
            client::cancel(&files).or_fail(|| format!("having VM '{vm}' stay"))?;
            let done = super::Done { vm, done: "stays" };
            return output::answer(common.json, &done, |is| format!("{} {}", is.vm, is.done));
        };
        let what = || format!("moving VM '{vm}' to host {to}");
        let progress = Progress::spinner(what());
        let agent = self.socket.agent(common)?;
        let order = order::Migrate { vm: vm.clone(), to: to.clone(), cache: self.cache };
        let Awaited { migration, address, identity } =
            agent.call(&what(), LIMIT, async |client| client.post(path::MIGRATE, &order).await)?;
        let order = Order {
            migration,
            to: to.clone(),
            address,
            identity,
            mode: match self.mode {
                ModeName::Instant => Mode::Instant,
                ModeName::Precopy => Mode::PreCopy,
                ModeName::Postcopy => Mode::PostCopy,
            },
            bandwidth: self.bandwidth,
            max_downtime: self.max_downtime,
            may_leave: !self.no_postcopy,
        };
        let report = client::migrate(&files, &order, |is| {
            let left =
                is.remaining_ms.map_or(String::new(), |ms| format!(", about {ms:.0} ms left"));
            progress.say(format!(
                "{}: {}; {} rounds, {} sent, {} to the pool, {}/s become dirty{left}",
                what(),
                is.phase,
                is.rounds,
                Bytes(is.bytes_sent),
                Bytes(is.bytes_pool),
                Bytes(is.dirty_rate),
            ));
            true
        })
        .or_fail(what)?;
        drop(progress);
        output::answer(common.json, &Moved { vm, to, report }, |Moved { vm, to, report }| {
            format!(
                "{vm} runs on {to}: {:.0} ms in all, of which it stood still for {:.0}; {} of pages sent, {} written to the pool, {} of all else",
                report.total_ms,
                report.downtime_ms,
                Bytes(report.bytes_pages),
                Bytes(report.bytes_pool),
                Bytes(report.bytes_metadata),
            )
        })
    }
}
