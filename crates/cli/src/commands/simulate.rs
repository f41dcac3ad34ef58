//! `aquifer simulate`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, HostName};
use aquifer_sim::{
    Amounts, Costs, Faults, Load, MessageCounts, Network, Report, Scenario, Simulation, VmSpec,
    read_trace, synthetic_hosts, synthetic_vms,
};
use clap::Args;
use humantime::format_duration;

use super::Common;
use crate::failure::{Failure, OrFail, Result};
use crate::manual::Manual;
use crate::output;
use crate::table::{Column, table};

/// Simulate a cluster of hosts that lend each other memory
///
/// Runs the decisions of the agents of many hosts in one process, against simulated memory, VMs,
/// networks and copies. After each event it checks the rules of the protocol. It needs no rights
/// and touches nothing of this host.
///
/// The same options give the same report. The run time goes to standard error.
#[derive(Debug, Args)]
pub struct Simulate {
    /// Number of hosts; of a trace, the first hosts by name [default: 100, or all of the trace]
    #[arg(long, value_name = "N")]
    hosts: Option<usize>,
    /// Simulated time
    #[arg(long = "for", value_name = "TIME", default_value = "1h",
        value_parser = humantime::parse_duration)]
    duration: Duration,
    /// Start of all random numbers
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Demand of programs: 'synthetic', or a file with lines of seconds,host,bytes
    #[arg(long, value_name = "FILE", default_value = SYNTHETIC,
        value_hint = clap::ValueHint::FilePath)]
    trace: PathBuf,
    /// RAM of each host
    #[arg(long, value_name = "SIZE", default_value = "64G")]
    memory: Bytes,
    #[command(flatten)]
    vms: VmArgs,
    #[command(flatten)]
    network: NetworkArgs,
    #[command(flatten)]
    faults: FaultArgs,
}

const SYNTHETIC: &str = "synthetic";

#[derive(Debug, Args)]
struct VmArgs {
    /// VMs of each host at the start [default: 4, or none with a trace]
    #[arg(long, value_name = "N")]
    vms: Option<usize>,
    /// Mean size of a VM [default: a sixteenth of the RAM]
    #[arg(long, value_name = "SIZE")]
    vm_size: Option<Bytes>,
    /// How long overload lasts before a VM moves to another host, or 'never'
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = move_after)]
    move_after: MoveAfter,
}

/// How long overload lasts before a VM moves; `None` for never.
#[derive(Clone, Copy, Debug)]
struct MoveAfter(Option<Duration>);

#[derive(Debug, Args)]
struct NetworkArgs {
    /// Probability that the network loses a message
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = probability)]
    loss: f64,
    /// Probability that a message arrives twice
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = probability)]
    duplication: f64,
    /// Mean delay of a message; one in fifty takes twenty times as long
    #[arg(long, value_name = "TIME", default_value = "1ms",
        value_parser = humantime::parse_duration)]
    delay: Duration,
    /// Bytes that a host copies over the network in a second
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    bandwidth: Bytes,
}

#[derive(Debug, Args)]
struct FaultArgs {
    /// Crashes of each agent in an hour, on average
    #[arg(long, value_name = "RATE", default_value_t = 0.0, value_parser = rate,
        allow_negative_numbers = true)]
    crashes: f64,
    /// How often the network cuts each host off in an hour, on average
    #[arg(long, value_name = "RATE", default_value_t = 0.0, value_parser = rate,
        allow_negative_numbers = true)]
    cuts: f64,
    /// Longest outage, of an agent or a network; the shortest is a tenth of it
    #[arg(long, value_name = "TIME", default_value = "1m",
        value_parser = humantime::parse_duration)]
    outage: Duration,
    /// How often the operator drains each host in an hour, on average, for ten minutes at most
    #[arg(long, value_name = "RATE", default_value_t = 0.0, value_parser = rate,
        allow_negative_numbers = true)]
    drains: f64,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer simulate", "Simulate 100 hosts for an hour"),
        (
            "aquifer simulate --hosts 20 --loss 0.05 --crashes 6 --cuts 2 --seed 7",
            "Simulate 20 hosts on a lossy network, with agents that crash every ten minutes",
        ),
        (
            "aquifer simulate --vms 8 --drains 0.1 --move-after 2m",
            "Simulate hosts with eight VMs each; a tenth of the hosts drain in the hour",
        ),
        ("aquifer simulate --trace demand.csv --json", "Replay a trace, and print one object"),
    ],
    notes: &[(
        "Limits",
        "It models memory in bytes, not pages, and no disk's speed. \
         docs/explain/simulation.md says what it models and what it does not.",
    )],
    exit: &[("3", "a rule was violated; standard error has the seed and the latest events")],
    see_also: &["aquifer-serve-agent(1)"],
    ..Manual::NONE
};

/// The exit code for a violation.
const VIOLATED: u8 = 3;

impl Simulate {
    /// Runs the simulation and prints its report.
    ///
    /// # Errors
    /// If the trace cannot be read, or an option makes no sense.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let begun = Instant::now();
        let simulated = Simulation::new(self.scenario()?).run();
        let ended = match simulated {
            Ok(report) => {
                output::answer(common.json, &report, text)?;
                ExitCode::SUCCESS
            }
            Err(violation) => {
                Failure::new("simulating", violation).report(common.json);
                ExitCode::from(VIOLATED)
            }
        };
        eprintln!("run time: {:.1} s", begun.elapsed().as_secs_f64());
        Ok(ended)
    }

    fn scenario(&self) -> Result<Scenario> {
        let is_synthetic = self.trace == Path::new(SYNTHETIC);
        let each = self.vms.vms.unwrap_or(if is_synthetic { 4 } else { 0 });
        let size = self.vms.vm_size.unwrap_or(Bytes(self.memory.0 / 16));
        let hosts = match is_synthetic {
            true => self.synthetic(Bytes(size.0.saturating_mul(each as u64)))?,
            false => self.traced()?,
        };
        if hosts.is_empty() || self.duration.is_zero() || self.memory == Bytes::ZERO {
            return Err(Failure::new(
                "simulating",
                "--hosts, --for and --memory must be above zero",
            ));
        }
        let vms = synthetic_vms(hosts.len(), each, size, self.seed);
        let vms = vms.or_fail(|| "making the VMs of the hosts")?;
        self.check_room(&vms)?;
        let NetworkArgs { loss, duplication, delay, bandwidth } = self.network;
        let FaultArgs { crashes, cuts, outage, drains } = self.faults;
        Ok(Scenario {
            network: Network { loss, duplication, delay },
            faults: Faults { crashes, cuts, longest: outage, drains, ..Faults::default() },
            costs: Costs { bandwidth, ..Costs::default() },
            vms,
            move_after: self.vms.move_after.0,
            ..Scenario::new(hosts, self.memory, self.duration, self.seed)
        })
    }

    /// Returns hosts whose programs use the RAM that VMs of this size in all leave. VMs use half of
    /// their memory on average.
    fn synthetic(&self, vms: Bytes) -> Result<Vec<(HostName, Load)>> {
        let left = self.memory.saturating_sub(Bytes(vms.0 / 2));
        let hosts = synthetic_hosts(self.hosts.unwrap_or(100), left, self.seed);
        hosts.or_fail(|| "making the load of the hosts")
    }

    /// Checks that each host has RAM for all that it promises to its VMs.
    fn check_room(&self, vms: &[Vec<VmSpec>]) -> Result<()> {
        let promised = vms.iter().map(|vms| vms.iter().map(|vm| vm.cache).sum::<Bytes>());
        match promised.max() {
            Some(most) if most > self.memory => {
                let memory = self.memory;
                let what = format!("a host's VMs may take {most} of its RAM, which is {memory}");
                Err(Failure::new("simulating", what)
                    .help("choose fewer --vms, or a smaller --vm-size"))
            }
            _ => Ok(()),
        }
    }

    fn traced(&self) -> Result<Vec<(HostName, Load)>> {
        let what = || format!("reading the trace {}", self.trace.display());
        let text = std::fs::read_to_string(&self.trace).or_fail(what)?;
        let mut hosts = read_trace(&text).or_fail(what)?;
        hosts.truncate(self.hosts.unwrap_or(usize::MAX));
        Ok(hosts)
    }
}

fn move_after(text: &str) -> Result<MoveAfter, String> {
    match text {
        "never" => Ok(MoveAfter(None)),
        time => match humantime::parse_duration(time) {
            Ok(time) => Ok(MoveAfter(Some(time))),
            Err(error) => Err(format!("{error}; write a time such as 5m, or never")),
        },
    }
}

fn probability(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("write a number from 0 to 1, for example 0.05".to_owned()),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && rate >= 0.0 => Ok(rate),
        _ => Err("write a number from 0 up, for example 6 for every ten minutes".to_owned()),
    }
}

fn vms(report: &Report) -> String {
    let Report { vms: moves, overloaded_s, .. } = report;
    let shortest = moves.shortest_s.map_or(String::new(), |shortest_s| {
        format!(", of one VM at least {shortest_s:.0} s apart")
    });
    format!(
        "{} VMs: {} moved for overload{shortest}; {} for {} drains; {} leases with them\n\
         {} moves failed, {} found no host, {} cancelled\n\
         {:.1} % of the hosts' time was overload",
        moves.total,
        moves.for_overload,
        moves.for_drains,
        moves.drains,
        moves.leases,
        moves.failed,
        moves.refused,
        moves.cancelled,
        100.0 * overloaded_s / (report.simulated_s * report.hosts as f64)
    )
}

fn text(report: &Report) -> String {
    let Report { counts, role_changes, .. } = report;
    let MessageCounts { messages, offer_questions, lost_messages, duplicates } = counts.network;
    let time = format_duration(Duration::from_secs_f64(report.simulated_s));
    let oscillation = role_changes.host.as_ref().map_or(String::new(), |host| {
        format!(", at most {} within ten minutes ({host})", role_changes.most_in_ten_minutes)
    });
    let rows = [
        ("all programs and VMs", report.usage.demand),
        ("of that in other hosts' memory", report.usage.remote),
        ("of that on disks", report.usage.on_disk),
        ("RAM that stood free for it", report.usage.stranded),
        ("of that below the upper threshold", report.usage.stranded_below_upper),
    ];
    let row = |(what, Amounts { average, most }): (&str, Amounts)| {
        [what.to_owned(), average.to_string(), most.to_string()]
    };
    let columns = [Column::from("MEMORY"), Column::numbers("AVERAGE"), Column::numbers("MOST")];
    let lines = [
        format!(
            "{} hosts of {} for {time}, seed {}: {} steps, {} violations",
            report.hosts, report.memory, report.seed, counts.steps, report.violations
        ),
        format!(
            "{messages} messages, {offer_questions} of them for offers; {lost_messages} lost, \
             {duplicates} doubled"
        ),
        format!(
            "{} leases granted, {} recalled, {} expired with {} lost",
            counts.grants,
            counts.recalls,
            counts.expired,
            Bytes(counts.lost_bytes)
        ),
        format!("{} agents crashed, the network cut off {} hosts", counts.crashes, counts.cuts),
        format!("{:.1} role changes a host{oscillation}", role_changes.per_host),
        vms(report),
        String::new(),
        table(columns, rows.map(row)),
    ];
    lines.join("\n")
}
