//! The commands, one file each: arguments, manual and implementation.

pub mod cluster;
pub mod completions;
mod config_page;
pub mod demo;
pub mod doctor;
pub mod group;
mod headings;
pub mod host;
pub mod load;
pub mod man;
mod names;
mod or_none;
#[cfg(test)]
mod reference;
pub mod region;
mod renamed;
pub mod run;
pub mod serve;
pub mod simulate;
pub mod status;
#[cfg(test)]
mod tests;
pub mod vm;
pub mod volume;
pub mod why;
pub mod worker;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use clap_complete::CompleteEnv;

use crate::failure::Result;
use crate::manual::Manual;

/// Lend and borrow spare RAM between hosts
///
/// A host that runs short of memory swaps to its peers' spare RAM instead of to a disk. Each host
/// runs an agent ('aquifer serve agent'). Agents lend and borrow automatically as memory use
/// changes.
///
/// You can also do this by hand, without agents. 'aquifer serve export' offers RAM as a network
/// block device, and 'aquifer volume attach' swaps to it. 'aquifer run' runs one program with
/// limited RAM and the rest of its memory in the pool.
///
/// Most command lines are 'aquifer NOUN VERB', then a name if the verb needs one, then options.
/// Sizes are always options: write 4096, 512MiB or 2G (powers of 1024). Write times as 500ms, 8s or
/// 2m.
///
/// All commands work with stock Linux kernels. 'aquifer doctor' reports what this host supports and
/// what is missing.
#[derive(Debug, Parser)]
#[command(name = "aquifer", version, disable_help_subcommand = true, max_term_width = 100)]
pub struct Cli {
    /// What every command understands.
    #[command(flatten)]
    pub common: Common,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The default of --run-dir, and the variable that sets it.
const RUN_DIR: &str = "/run/aquifer";
const RUN_DIR_VARIABLE: &str = "AQUIFER_RUN_DIR";

/// What every command understands.
#[derive(Debug, Clone, Args)]
pub struct Common {
    /// Print JSON, for programs
    ///
    /// Standard output gets one object, or an array where the command lists things of one kind; a
    /// command that reports repeatedly prints an object a line. A failure is one object {"error":
    /// {"what", "why", "help"}} on standard error, and a warning there is {"warning": {…}}.
    #[arg(long, global = true, display_order = 900)]
    pub json: bool,
    /// Directory (RUN_DIR) for sockets, records and locks
    ///
    /// 'serve agent' takes its own from its configuration.
    #[arg(
        long,
        global = true,
        display_order = 901,
        value_name = "DIR",
        env = RUN_DIR_VARIABLE,
        default_value = RUN_DIR
    )]
    pub run_dir: PathBuf,
}

/// The commands.
#[derive(Debug, Subcommand)]
#[expect(
    missing_docs,
    reason = "a variant's text is the command's help, which its arguments' type carries"
)]
pub enum Command {
    Status(status::StatusArgs),
    Why(why::Why),
    Doctor(doctor::Doctor),
    Run(run::Run),
    Cluster(cluster::Cluster),
    Host(host::Host),
    Volume(volume::Volume),
    Region(region::Region),
    Vm(vm::Vm),
    Group(group::Group),
    Serve(serve::Serve),
    Demo(demo::Demo),
    Simulate(simulate::Simulate),
    Completions(completions::Completions),
    Man(man::Man),
}

impl Cli {
    /// Runs the command; its exit code is the program's.
    ///
    /// # Errors
    /// If the command fails.
    pub fn run(self) -> Result<ExitCode> {
        let common = &self.common;
        match self.command {
            Command::Status(command) => command.run(common),
            Command::Why(command) => command.run(common),
            Command::Doctor(command) => command.run(common),
            Command::Run(command) => command.run(common),
            Command::Cluster(command) => command.run(common),
            Command::Host(command) => command.run(common),
            Command::Volume(command) => command.run(common),
            Command::Region(command) => command.run(common),
            Command::Vm(command) => command.run(common),
            Command::Group(command) => command.run(common),
            Command::Serve(command) => command.run(common),
            Command::Demo(command) => command.run(common),
            Command::Simulate(command) => command.run(common),
            Command::Completions(command) => command.run(),
            Command::Man(command) => command.run(),
        }
    }
}

/// The manual of each command.
const MANUALS: &[(&str, &Manual)] = &[
    ("status", &status::MANUAL),
    ("why", &why::MANUAL),
    ("doctor", &doctor::MANUAL),
    ("run", &run::MANUAL),
    ("cluster", &cluster::MANUAL),
    ("host", &host::MANUAL),
    ("volume", &volume::MANUAL),
    ("region", &region::MANUAL),
    ("vm", &vm::MANUAL),
    ("group", &group::MANUAL),
    ("serve", &serve::MANUAL),
    ("demo", &demo::MANUAL),
    ("simulate", &simulate::MANUAL),
    ("completions", &completions::MANUAL),
    ("man", &man::MANUAL),
];

/// The manual of `aquifer` itself.
const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer doctor", "Check what this host supports and what is missing"),
        ("aquifer demo sharing", "Simulate two hosts on this machine that lend each other memory"),
        ("aquifer serve export --size 4G --nbd 127.0.0.1:10809", "Offer 4 GiB of this host's RAM"),
        (
            "aquifer run --local 256M --lender nbd://127.0.0.1:10809/ -- make",
            "Run a program with 256 MiB of RAM and the rest in the pool",
        ),
    ],
    files: &[
        ("/etc/aquifer", "the agent's configuration and certificates, from 'aquifer cluster'"),
        ("/run/aquifer", "sockets of the agent and of volumes, locks of running commands"),
        ("/dev/shm/aquifer", "lent pages: files on a tmpfs that outlive their server process"),
    ],
    see_also: &[
        "https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md",
        "swapon(8)",
        "cgroups(7)",
    ],
    ..Manual::NONE
};

/// Returns the manuals of a command's subcommands.
fn parts(command: &str) -> &'static [(&'static str, &'static Manual)] {
    match command {
        "cluster" => cluster::MANUALS,
        "host" => host::MANUALS,
        "volume" => volume::MANUALS,
        "region" => region::MANUALS,
        "vm" => vm::MANUALS,
        "group" => group::MANUALS,
        "serve" => serve::MANUALS,
        _ => &[],
    }
}

fn find(manuals: &'static [(&str, &Manual)], name: &str) -> &'static Manual {
    manuals.iter().find(|(known, _)| *known == name).map_or(&Manual::NONE, |(_, manual)| manual)
}

/// Returns the manual of a command: of `aquifer` itself for no words, of `aquifer vm start` for
/// `["vm", "start"]`.
pub(crate) fn manual(words: &[&str]) -> &'static Manual {
    match words {
        [] => &MANUAL,
        [command] => find(MANUALS, command),
        [command, part, ..] => find(parts(command), part),
    }
}

/// Returns the whole command line, with manuals, headings and names to complete in their places.
pub(crate) fn command() -> clap::Command {
    furnished(Cli::command(), &[])
}

fn furnished(command: clap::Command, words: &[&str]) -> clap::Command {
    let furnish = |argument| names::completed(headings::headed(argument, words), words);
    manual(words).attach(command).mut_args(furnish).mut_subcommands(|part| {
        let name = part.get_name().to_owned();
        furnished(part, &[words, &[&name]].concat())
    })
}

/// Answers a shell that asks how a line can go on; returns `None` if no shell asks.
pub(crate) fn complete(line: &[OsString]) -> Option<ExitCode> {
    let here = std::env::current_dir().ok();
    let complete = CompleteEnv::with_factory(command).var(completions::VARIABLE);
    match complete.try_complete(line, here.as_deref()) {
        Ok(true) => Some(ExitCode::SUCCESS),
        Ok(false) => None,
        Err(error) => Some(refused(&error)),
    }
}

/// Parses a command line.
///
/// # Errors
/// With the exit code, if there is nothing to run. Either help was asked for and is printed, or the
/// line is invalid (2) and the reason is printed.
pub fn parse(line: impl IntoIterator<Item = OsString>) -> Result<Cli, ExitCode> {
    parse_line(command(), line.into_iter().collect(), renamed::hint)
}

/// Parses the command line of another parser than [`Cli`].
///
/// # Errors
/// See [`parse`].
pub fn parse_as<P: FromArgMatches>(
    command: clap::Command,
    line: Vec<OsString>,
) -> Result<P, ExitCode> {
    parse_line(command, line, |error, _| error)
}

fn parse_line<P: FromArgMatches>(
    command: clap::Command,
    line: Vec<OsString>,
    hint: impl FnOnce(clap::Error, &[OsString]) -> clap::Error,
) -> Result<P, ExitCode> {
    let as_json = line.iter().take_while(|word| *word != "--").any(|word| word == "--json");
    let parsed =
        command.try_get_matches_from(&line).and_then(|matches| P::from_arg_matches(&matches));
    parsed.map_err(|error| misuse(&hint(error, &line), as_json))
}

/// Prints the error, or the help that was asked for, and returns the exit code.
pub(crate) fn misuse(error: &clap::Error, as_json: bool) -> ExitCode {
    if !(as_json && error.use_stderr()) {
        return refused(error);
    }
    let text = error.render().to_string();
    let why = text.trim_start_matches("error: ").trim_end();
    crate::failure::Failure::new("reading the command line", why).report(true);
    exit_code(error)
}

/// Prints why there is nothing to run.
fn refused(error: &clap::Error) -> ExitCode {
    // The reader may be gone; the exit code still tells.
    let _ = error.print();
    exit_code(error)
}

fn exit_code(error: &clap::Error) -> ExitCode {
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}
