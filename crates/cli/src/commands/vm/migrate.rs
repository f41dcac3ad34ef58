//! `aquifer vm migrate`.

use std::path::Path;
use std::time::Duration;

use aquifer_api::order::{self, Awaited};
use aquifer_api::path;
use aquifer_page::{Bytes, HostName, RegionName};
use aquifer_vm::migrate::{MigrationReport, Mode, Order};
use aquifer_vm::process::{Files, client};
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::agent_call::Socket;
use crate::commands::Common;
use crate::failure::{OrFail, Result};
use crate::output;
use crate::progress::Progress;

/// Migrate a VM to another host while it runs
///
/// Returns when the VM and all its memory are there. Until the VM runs there, ^C or a failure
/// leaves it here, untouched.
#[derive(Debug, Args)]
pub struct Migrate {
    /// Name of the VM
    name: RegionName,
    /// Destination host, a peer of this host
    ///
    /// By default the agent chooses: of the hosts that take the VM, the one that can spare most.
    #[arg(long, value_name = "HOST")]
    to: Option<HostName>,
    /// Cancel the VM's current migration
    #[arg(long, conflicts_with = "to")]
    cancel: bool,
    /// How the VM's memory moves
    #[arg(long, value_name = "MODE", default_value = "instant")]
    mode: ModeName,
    /// Maximum bytes to send a second, 1MiB or more
    ///
    /// By default there is no limit.
    #[arg(long, value_name = "SIZE", value_parser = bandwidth)]
    bandwidth: Option<Bytes>,
    /// Longest pause of the VM, as far as it can be predicted
    #[arg(long, value_name = "TIME", default_value = "300ms",
        value_parser = humantime::parse_duration)]
    max_downtime: Duration,
    /// Fail if --max-downtime would be exceeded
    ///
    /// Applies to the modes 'instant' and 'precopy'.
    ///
    /// This happens if the VM dirties memory faster than the network carries it. By default the
    /// VM then runs there first, and its missing pages follow (post-copy).
    #[arg(long)]
    no_postcopy: bool,
    /// Maximum local RAM for the VM there; default as here
    #[arg(long, value_name = "SIZE")]
    cache: Option<Bytes>,
    #[command(flatten)]
    socket: Socket,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ModeName {
    /// Write dirty pages to the pool, then pause to send the rest
    Instant,
    /// Send the local cache round by round while the VM runs
    Precopy,
    /// Run it there first; needs both hosts until its pages arrive
    Postcopy,
}

/// Parses the bandwidth. Below the least, each side would run into its timeout.
fn bandwidth(text: &str) -> std::result::Result<Bytes, String> {
    let bandwidth: Bytes = text.parse().map_err(|error| format!("{error}"))?;
    let least = Bytes::mib(1);
    if bandwidth < least { Err(format!("use at least {least}")) } else { Ok(bandwidth) }
}

/// How long the agents may take to prepare the destination.
const LIMIT: Duration = Duration::from_secs(70);

#[derive(Debug, Serialize)]
struct Moved {
    vm: RegionName,
    to: HostName,
    #[serde(flatten)]
    report: MigrationReport,
}

impl Migrate {
    pub(super) fn run(self, common: &Common, run_dir: &Path) -> Result<()> {
        let vm = self.name;
        let files = Files::new(run_dir, &vm);
        if self.cancel {
            client::cancel(&files).or_fail(|| format!("cancelling the migration of VM '{vm}'"))?;
            let done = super::Done { vm, done: "stays" };
            return output::answer(common.json, &done, |is| format!("{} {}", is.vm, is.done));
        }
        let place = match &self.to {
            Some(to) => format!("to host {to}"),
            None => "to another host".to_owned(),
        };
        let what = format!("migrating VM '{vm}' {place}");
        let progress = Progress::spinner(what.clone());
        let agent = self.socket.agent(common)?;
        let order = order::Migrate { vm: vm.clone(), to: self.to, cache: self.cache };
        let Awaited { to, migration, address, identity, defined } =
            agent.call(&what, LIMIT, async |client| client.post(path::MIGRATE, &order).await)?;
        let what = || format!("migrating VM '{vm}' to host {to}");
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
            defined,
        };
        let report = client::migrate(&files, &order, |is| {
            let left =
                is.remaining_ms.map_or(String::new(), |ms| format!(", about {ms:.0} ms left"));
            progress.say(format!(
                "{}: {}; {} rounds, {} sent, {} to the pool, dirties {}/s{left}",
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
                "{vm} runs on {to}: {:.0} ms in all, paused for {:.0} ms; \
                 {} of pages sent, {} written to the pool, {} of other data",
                report.total_ms,
                report.downtime_ms,
                Bytes(report.bytes_pages),
                Bytes(report.bytes_pool),
                Bytes(report.bytes_metadata),
            )
        })
    }
}
