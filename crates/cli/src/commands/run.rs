//! `aquifer run`.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};

use aquifer_page::Bytes;
use clap::Args;

use super::Common;
use crate::agent_call::Socket;
use crate::cgroup::{Cgroup, Hierarchy, Limits, Swap};
use crate::failure::{Failure, OrFail, Result};
use crate::instance::Instance;
use crate::io_timeout::{self, IoTimeout};
use crate::lender::{ClaimedLender, Purpose, Trust};
use crate::lender_uri::LenderUri;
use crate::lenders::Lenders;
use crate::manual::Manual;
use crate::run::child::{Supervisor, exit_code};
use crate::run::leftovers::{self, Note};
use crate::run::pool::{Pool, RunMemory};
use crate::run::priority::Choice;
use crate::run::watch::{Place, Watch};
use crate::volumes::{Protection, Volumes};

/// The exit code for a command that SIGBUS killed after pages of its swap were lost. It differs
/// from the codes that shells use, as the command is not at fault.
const PAGES_LOST: u8 = 125;

const KILLED_BY_SIGBUS: u8 = 128 + 7;

/// Run a command with limited RAM and the rest in the pool
///
/// The command runs in a memory cgroup with --local of RAM. The kernel swaps the rest to memory
/// that this host's agent borrows, or to a --lender.
///
/// The command runs as if the shell had started it: signals reach it, and the terminal is its own.
/// Its children and threads share the limit. Its exit code is the exit code of 'aquifer run'.
#[derive(Debug, Args)]
pub struct Run {
    /// Maximum RAM for the command
    #[arg(long, value_name = "SIZE")]
    local: Bytes,
    /// Maximum swap of the command
    ///
    /// By default there is no limit: the command can use the whole export with --lender, else twice
    /// --local, which the agent borrows, and then other swap of this host. With 0 the kernel kills
    /// the command when it exceeds --local.
    #[arg(long, value_name = "SIZE")]
    remote: Option<Bytes>,
    /// Swap priority of the pool's memory, 0 to 32767
    ///
    /// The default is above all other swap of this host. The kernel spreads pages over devices of
    /// one priority, and uses a lower one when they are full. If any device with its pages fails,
    /// the command dies.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16)
        .range(0..=i64::from(aquifer_blockdev::swap::MAX_PRIORITY)))]
    priority: Option<u16>,
    /// Name of the cgroup; default aquifer-run-PID
    #[arg(long, value_name = "NAME", value_parser = cgroup_name)]
    name: Option<String>,
    /// Swap to this NBD export or NVMe namespace; repeat for more
    ///
    /// URIs are as in 'aquifer volume attach'. By default the agent borrows memory.
    #[arg(long = "lender", value_name = "URI")]
    lenders: Vec<LenderUri>,
    /// Copies of each page at the lenders
    ///
    /// With 'mirror', name lenders in pairs on different hosts: the second of each pair has a copy
    /// of what the first has. Each write goes to both. If one dies, the command goes on with the
    /// other. With the agent, 'borrow.protection_of_swap' of its configuration applies.
    #[arg(long, value_name = "KIND", default_value = "none", requires = "lenders")]
    protection: Protection,
    /// How long a program waits for a silent --lender, or 'forever'
    ///
    /// In whole seconds; 'forever' means one day. After that, the program gets SIGBUS. With the
    /// agent, borrow.io_timeout of its configuration applies.
    #[arg(long, value_name = "TIME", requires = "lenders", default_value = "8s",
        value_parser = io_timeout::parse)]
    io_timeout: IoTimeout,
    #[command(flatten)]
    trust: Trust,
    #[command(flatten)]
    socket: Socket,
    /// Command and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "CMD"
    )]
    command: Vec<OsString>,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        (
            "aquifer run --local 256M -- make -j8",
            "Borrow from the agent for as long as the command runs",
        ),
        (
            "aquifer run --local 256M --lender 'nbd+unix:///?socket=/run/aquifer/export.sock' \
             -- ./job",
            "Swap to 'aquifer serve export --size 4G' without an agent",
        ),
        (
            "aquifer run --local 256M --protection mirror --lender nbds://b/ --lender nbds://c/ \
             --tls /etc/aquifer/tls -- ./job",
            "Swap to two hosts at once, and go on if one of them dies",
        ),
        ("aquifer run --local 1G --remote 0 -- ./job", "Limit the command, without the pool"),
    ],
    notes: &[
        (
            "Signals",
            "aquifer forwards INT, TERM, HUP, QUIT, USR1, USR2 and WINCH to the command. Signals \
             of the terminal (^C) reach the command directly, and ^Z stops both. A signal that \
             was ignored when aquifer started (nohup) stays ignored.",
        ),
        (
            "Cleanup",
            "When the command ends, aquifer kills processes left in the cgroup, removes the \
             cgroup, and gives the memory back. If aquifer is killed, the kernel kills the \
             command, and the next 'aquifer run' removes the leftovers.",
        ),
        (
            "Events",
            "While the command runs, standard error gets a line for each event. Events are a \
             silent, lost or returned lender, a lost page, and moves of pages to or from the local \
             spill file. With --json each line is an object {\"event\": ...}. A page is lost when \
             its lender is silent for --io-timeout: a program that touches it gets SIGBUS.",
        ),
        (
            "Costs",
            "A page outside RAM costs a round trip to the lender when it is touched. Swap belongs \
             to the whole kernel: while the command runs, other programs of the host may swap to \
             the same memory.",
        ),
    ],
    exit: &[
        ("N", "the command's own exit code"),
        ("125", "SIGBUS killed the command after its pages in the pool were lost"),
        ("126", "the command was found but cannot be run"),
        ("127", "the command was not found"),
        ("128+N", "signal N killed the command; 137 may be the kernel, out of memory"),
    ],
    see_also: &["aquifer-serve-export(1)", "aquifer-volume-attach(1)", "aquifer-serve-agent(1)"],
    ..Manual::NONE
};

impl Run {
    /// Runs the command; a command that cannot be started gives exit code 126 or 127.
    ///
    /// # Errors
    /// If the cgroup cannot be made or removed, if no lender has memory, or if the memory cannot be
    /// given back.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let marks = common.run_dir.join("runs");
        let what = || format!("running {}", self.command[0].display());
        let hierarchy = Hierarchy::find().or_fail(what)?;
        // From here on, a signal ends this program only after it has removed all that it makes.
        let mut supervisor = Supervisor::new().or_fail(what)?;
        let pool = Pool {
            agent: self.socket.clone().agent(common)?,
            volumes: Volumes::under(&common.run_dir)?,
        };
        leftovers::clean_up(&marks, &hierarchy, &pool, common.json);
        let mut instance = Instance::claim(&marks, "run")
            .or_fail(|| format!("recording this run in {}", marks.display()))?;
        let name = self.name.clone().unwrap_or_else(|| format!("aquifer-{}", instance.name()));

        let mut note = Note { cgroup: name.clone(), volume: None };
        note.leave(&mut instance)?;
        let memory = self.swap_in(&pool, &common.run_dir)?;
        note.volume = memory.as_ref().map(|memory| memory.volume);
        note.leave(&mut instance)?;
        let watch = memory.and_then(|memory| self.watch(memory.place, common.json));
        let ended = self.run_in_cgroup(&hierarchy, &name, &mut supervisor, common.json);
        let lost_pages = watch.is_some_and(Watch::end);
        // The cgroup goes first: the swapped pages belong to its processes, and must be freed
        // before swapoff.
        let returned = note.volume.map_or(Ok(()), |volume| pool.release(volume));
        let code = ended.and_then(|code| returned.map(|()| code))?;
        if code != KILLED_BY_SIGBUS || !lost_pages {
            return Ok(ExitCode::from(code));
        }
        let why = "SIGBUS killed it, as its pages in the pool were lost";
        let help = "run it again with another lender, or with more RAM (--local)";
        Failure::new(what(), why).help(help).report(common.json);
        Ok(ExitCode::from(PAGES_LOST))
    }

    /// Starts to report the lenders' events. A failure is only reported: the command runs without.
    fn watch(&self, place: Place, json: bool) -> Option<Watch> {
        let what = || "watching the lenders of the command";
        Watch::start(place, json).or_fail(what).inspect_err(|failure| failure.warn(json)).ok()
    }

    /// Runs the command in a cgroup of its own, and removes the cgroup.
    fn run_in_cgroup(
        &self,
        hierarchy: &Hierarchy,
        name: &str,
        supervisor: &mut Supervisor,
        json: bool,
    ) -> Result<u8> {
        let what = || format!("running {}", self.command[0].display());
        let limits = Limits { memory: self.local, swap: self.limit() };
        hierarchy.enable().or_fail(what)?;
        let cgroup = Cgroup::create(hierarchy, name, limits).or_fail(what)?;
        let ended = match supervisor.asked_to_end() {
            Some(signal) => Ok(u8::try_from(128 + signal).unwrap_or(u8::MAX)),
            None => self.run_in(&cgroup, supervisor, json),
        };
        let removed = cgroup.remove().or_fail(what);
        ended.and_then(|code| removed.map(|()| code))
    }

    fn limit(&self) -> Swap {
        match self.remote {
            Some(Bytes::ZERO) => Swap::Forbidden,
            Some(remote) => Swap::AtMost(remote),
            None => Swap::Unlimited,
        }
    }

    /// Returns the advice for a command that the kernel killed for lack of memory.
    fn out_of_memory(&self, swap_ran_out: bool) -> &'static str {
        match (self.limit(), swap_ran_out) {
            (Swap::Forbidden, _) => "give it more RAM with --local, or use the pool with --remote",
            (_, true) => "give it more memory with --remote or --local",
            (_, false) => {
                "give it more RAM with --local: it did not use up --remote, so its memory cannot \
                 leave RAM, as locked (mlock) or kernel memory cannot"
            }
        }
    }

    /// Makes swap of memory in the pool; `None` if the command may have none.
    fn swap_in(&self, pool: &Pool, run_dir: &Path) -> Result<Option<RunMemory>> {
        if self.remote == Some(Bytes::ZERO) {
            return Ok(None);
        }
        if self.lenders.is_empty() {
            let bytes = self.remote.unwrap_or(Bytes(self.local.0.saturating_mul(2)));
            let choice = Choice::make(run_dir, self.priority)?;
            return pool.borrow(bytes, choice.priority).map(Some);
        }
        let what = format!("running {}", self.command[0].display());
        let find = |uri: &_| ClaimedLender::find(uri, &self.trust, None, Purpose::Volume("run"));
        let mirror = self.protection == Protection::Mirror;
        let lenders = Lenders::find(&what, &self.lenders, mirror, find)?;
        let choice = Choice::make(run_dir, self.priority)?;
        pool.attach(&lenders, choice.priority, self.io_timeout.of_volume()).map(Some)
    }

    /// Runs the command inside the cgroup to its end.
    fn run_in(&self, cgroup: &Cgroup, supervisor: &mut Supervisor, json: bool) -> Result<u8> {
        let what = || format!("running {}", self.command[0].display());
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]).arg0(&self.command[0]);
        crate::sys::start_in_cgroup(&mut command, cgroup.entrance().or_fail(what)?);
        crate::sys::signal_with_parent(&mut command, rustix::process::Signal::KILL);
        let status = match supervisor.run(&mut command) {
            Ok(status) => status,
            Err(error) => {
                let code = if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 };
                Failure::new(what(), error).report(json);
                return Ok(code);
            }
        };
        if let Ok(kills @ 1..) = cgroup.oom_kills() {
            let why = format!(
                "the kernel killed {kills} of its processes: out of memory at {} of RAM",
                self.local
            );
            let swap_ran_out = cgroup.swap_ran_out().unwrap_or(true);
            Failure::new(what(), why).help(self.out_of_memory(swap_ran_out)).report(json);
        }
        Ok(exit_code(status))
    }
}

/// Parses a name that is a single path component.
fn cgroup_name(text: &str) -> Result<String, String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let good =
        !text.is_empty() && text.len() <= 64 && !text.starts_with('.') && text.chars().all(allowed);
    if good {
        Ok(text.to_owned())
    } else {
        Err("use 1 to 64 of a-z, A-Z, 0-9, '-', '_' and '.'".to_owned())
    }
}
