use std::path::Path;
use std::time::Duration;

use aquifer_api::order::{self, Awaited};
use aquifer_api::path;
use aquifer_guest::migrate::{Mode, Order, Report};
use aquifer_guest::process::{Files, client};
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
/// Returns when it runs there. Until then ctrl-C, and whatever goes wrong, leaves it here as it was.
#[derive(Debug, Args)]
pub struct Migrate {
    /// The VM
    name: RegionName,
    /// The host, a peer of this one
    #[arg(long, value_name = "HOST")]
    to: HostName,
    /// How its memory goes over
    #[arg(long, value_name = "MODE", default_value = "instant")]
    mode: ModeName,
    /// Bytes a second that are sent at most; as many as go, unless told
    #[arg(long, value_name = "SIZE")]
    bandwidth: Option<Bytes>,
    /// For how long the VM may stand still at most, as far as that can be foreseen
    #[arg(long, value_name = "TIME", default_value = "300ms", value_parser = humantime::parse_duration)]
    max_downtime: Duration,
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
}

/// How long a host may take to get ready.
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
        let Self { name: vm, to, .. } = self;
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
            },
            bandwidth: self.bandwidth,
            max_downtime: self.max_downtime,
        };
        let report = client::migrate(&Files::new(run_dir, &vm), &order, |is| {
            progress.say(format!(
                "{}: {}; {} rounds, {} sent, {} to the pool, {}/s become dirty",
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
