//! `aquifer host drain`.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use aquifer_api::client::{CallError, Client};
use aquifer_api::order::{Drain as Order, Draining, Left, VmLeft, VmLeftState};
use aquifer_api::path;
use aquifer_page::Bytes;
use clap::Args;
use signal_hook::consts::signal::SIGINT;

use crate::agent_call::Socket;
use crate::commands::Common;
use crate::failure::{Failure, OrFail, Result};
use crate::manual::Manual;
use crate::output;
use crate::progress::Progress;

/// Take back all memory that this host lends, and move its VMs away
///
/// The host stops lending and takes no VM. Borrowers move their pages to other lenders or to a
/// local file, while their programs keep running. VMs that can move do so one at a time, each to
/// the host that has most room and takes it. The command ends when this host lends nothing and has
/// no VM, or when only VMs are left that cannot move: it names them, and why. While no host takes a
/// VM, the agent tries again. The host drains until 'aquifer host undrain' or until it boots again,
/// also if its agent restarts.
#[derive(Debug, Args)]
pub struct Drain {
    /// Stop waiting after this long; the agent keeps draining
    ///
    /// By default the command waits indefinitely.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    timeout: Option<Duration>,
    #[command(flatten)]
    socket: Socket,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer host drain", "Drain this host before a shutdown"),
        (
            "aquifer host drain --timeout 10m --json",
            "In a script: print one object a second, exit with 1 if a lease or a VM is left",
        ),
        ("aquifer host undrain", "Lend and take VMs again"),
    ],
    notes: &[
        (
            "Interruption",
            "You may stop the command at any time (^C): the agent keeps draining, and the command \
             says so. On failure it prints which leases and VMs are left, and why.",
        ),
        (
            "VMs that stay",
            "A VM with '--cache none' or huge pages, or an adopted one, cannot move: stop it, or \
             leave it. If no host takes a VM, for lack of room or because processors \
             differ, the agent tries again at least once a minute, and the command waits. Run it \
             again for an attempt at once.",
        ),
    ],
    exit: &[(
        "1",
        "also: memory is still lent or a VM is left, at the end, after --timeout or after ^C; or \
         the agent does not answer",
    )],
    see_also: &[
        "aquifer-host-undrain(1)",
        "aquifer-vm-migrate(1)",
        "aquifer-status(1)",
        "aquifer-host-return(1)",
        "aquifer-cluster-leave(1)",
    ],
    ..Manual::NONE
};

/// How long the agent may take to answer.
const LIMIT: Duration = Duration::from_secs(10);

/// How often the command asks for the progress.
const LOOK: Duration = Duration::from_millis(300);

/// How often the command prints the progress.
const TELL: Duration = Duration::from_secs(1);

/// The way out of a drain that goes on without the command.
const GOES_ON: &str = "the agent keeps draining; wait with 'aquifer host drain', \
                       or end it with 'aquifer host undrain'";

impl Drain {
    /// Drains this host.
    ///
    /// # Errors
    /// If the agent does not answer, or another command ends the drain. If memory is still lent or
    /// a VM is left when no wait would help, the time is over, or the user interrupts.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let agent = self.socket.agent(common)?;
        let interrupted = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(SIGINT, interrupted.clone()).or_fail(|| "draining")?;
        let order = Order { on: true };
        let begun: Draining =
            agent.call("draining", LIMIT, async |client| client.post(path::DRAIN, &order).await)?;
        let (total, vms) = (stored(&begun), begun.vms.len());
        let progress = Progress::bytes("taking back", total);
        let (began, mut told) = (Instant::now(), None::<Instant>);
        let mut now = begun;
        while !is_over(&now) {
            let left = stored(&now);
            progress.set(total.max(left).saturating_sub(left), total.max(left));
            if told.is_none_or(|told| told.elapsed() >= TELL) {
                told = Some(Instant::now());
                tell(common.json, &now)?;
            }
            if interrupted.load(Ordering::Relaxed) {
                return Err(unfinished("interrupted: ", &now).help(GOES_ON));
            }
            if self.timeout.is_some_and(|timeout| began.elapsed() >= timeout) {
                return Err(unfinished("", &now).help(GOES_ON));
            }
            std::thread::sleep(LOOK);
            now = agent.call("draining", LIMIT, get)?;
            if !now.on {
                return Err(Failure::new("draining", "another command ended the drain"));
            }
        }
        drop(progress);
        if !now.vms.is_empty() {
            tell(common.json, &now)?;
            return Err(unfinished("", &now).help(
                "stop each with 'aquifer vm stop NAME', or leave it here; the agent keeps trying \
                 to move those that can move, until 'aquifer host undrain'",
            ));
        }
        output::answer(common.json, &now, |now| done(now, total, vms))?;
        Ok(ExitCode::SUCCESS)
    }
}

async fn get(client: Client) -> Result<Draining, CallError> {
    client.get(path::DRAIN).await
}

/// Returns whether a longer wait would change nothing.
fn is_over(now: &Draining) -> bool {
    now.left.is_empty() && now.vms.iter().all(|vm| vm.state == VmLeftState::Stays)
}

fn stored(draining: &Draining) -> Bytes {
    draining.left.iter().map(|left| left.bytes).sum()
}

/// Makes a failure that lists what is left.
fn unfinished(before: &str, now: &Draining) -> Failure {
    let mut left = Vec::new();
    if !now.left.is_empty() {
        left.push(format!("{} is still lent", stored(now)));
    }
    if !now.vms.is_empty() {
        left.push(format!("{} left", counted(now.vms.len(), "VM")));
    }
    let left = left.join(", ");
    Failure::new(
        "draining",
        format!("{before}{left}: {}", lines(now).collect::<Vec<_>>().join("; ")),
    )
}

/// Describes a drain without remains.
fn done(now: &Draining, total: Bytes, vms: usize) -> String {
    let mut parts = Vec::new();
    if total > Bytes::ZERO {
        parts.push(format!("took back all {total}"));
    }
    if vms > 0 {
        parts.push(format!("moved {}", counted(vms, "VM")));
    }
    let next = match now.borrows {
        0 => "you can switch it off, or 'aquifer cluster leave'".to_owned(),
        volumes => format!(
            "it borrows {}: run 'aquifer host return' before you switch it off",
            counted(volumes, "volume")
        ),
    };
    parts.push(format!("this host lends nothing and has no VM; {next}"));
    parts.join("; ")
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn lines(now: &Draining) -> impl Iterator<Item = String> {
    now.left.iter().map(lease).chain(now.vms.iter().map(vm))
}

fn lease(left: &Left) -> String {
    let Left { lease, borrower, bytes, why, .. } = left;
    format!("{bytes} of {borrower} in lease {lease}: {why}")
}

fn vm(left: &VmLeft) -> String {
    let VmLeft { vm, state, why, to, sent } = left;
    match (state, to) {
        (VmLeftState::Moves, Some(to)) => format!("VM {vm} moves to {to}: {why}, {sent} sent"),
        (VmLeftState::Moves, None) => format!("VM {vm} moves: {why}"),
        (VmLeftState::Waits, _) => format!("VM {vm} waits: {why}"),
        (VmLeftState::Stays, _) => format!("VM {vm} stays: {why}"),
    }
}

/// Prints one object, or one line for each lease and VM.
fn tell(json: bool, now: &Draining) -> Result<()> {
    match json {
        true => output::json(now),
        false => lines(now).try_for_each(output::line),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draining(vms: &[(&str, VmLeftState, &str)]) -> Draining {
        let vm = |(vm, state, why): &(&str, VmLeftState, &str)| VmLeft {
            vm: vm.parse().expect("a name"),
            state: *state,
            why: (*why).to_owned(),
            to: None,
            sent: Bytes::ZERO,
        };
        Draining { on: true, left: Vec::new(), vms: vms.iter().map(vm).collect(), borrows: 0 }
    }

    #[test]
    fn a_drain_ends_when_only_vms_that_stay_are_left() {
        let (stays, waits) = (VmLeftState::Stays, VmLeftState::Waits);
        assert!(is_over(&draining(&[])) && is_over(&draining(&[("db", stays, "local")])));
        let both = draining(&[("db", stays, "local memory"), ("web", waits, "its turn")]);
        assert!(!is_over(&both));
        assert_eq!(
            unfinished("interrupted: ", &both).to_string(),
            "draining: interrupted: 2 VMs left: VM db stays: local memory; VM web waits: its turn"
        );
    }

    #[test]
    fn the_end_of_a_drain_says_what_comes_next() {
        let mut end = draining(&[]);
        assert_eq!(
            done(&end, Bytes::mib(64), 1),
            "took back all 64MiB; moved 1 VM; this host lends nothing and has no VM; you can \
             switch it off, or 'aquifer cluster leave'"
        );
        end.borrows = 2;
        assert!(
            done(&end, Bytes::ZERO, 0).ends_with(
                "it borrows 2 volumes: run 'aquifer host return' before you switch it off"
            )
        );
    }
}
