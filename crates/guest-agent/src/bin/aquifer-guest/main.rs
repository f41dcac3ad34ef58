//! The command `aquifer-guest`: a guest's agent, and the client that sends requests to it.

mod manual;
mod size;
mod view;

use std::fmt::Display;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use aquifer_guest_agent::agent::{self, Options};
use aquifer_guest_agent::{Client, Online, SOCKET};
use clap::{Parser, Subcommand};

use size::{Change, wait};

/// Resize this guest's memory on demand
///
/// The guest runs in a virtual machine of an Aquifer host. 'aquifer-guest run' is its agent: start
/// one per guest, as root, at boot. The agent reports the guest's memory to the host, requests more
/// when memory runs out, and brings added memory online. Programs and users request memory ahead of
/// need, and give it back, with 'aquifer-guest request'.
///
/// Agent and host communicate over the virtio-serial port org.aquifer.guest.0, and virtio-mem
/// resizes the guest. The kernel needs the drivers virtio_console and virtio_mem (Linux 5.8 or
/// later). With PSI (psi=1 on the kernel's command line) the agent also reacts to stalls.
#[derive(Debug, Parser)]
#[command(
    name = "aquifer-guest",
    version,
    disable_help_subcommand = true,
    max_term_width = 100,
    after_help = manual::SHORT,
    after_long_help = manual::ALL
)]
struct Arguments {
    /// Print JSON, for programs
    ///
    /// Standard output gets one object. A failure is one object {"error": TEXT} on standard error.
    #[arg(long, global = true, help_heading = "Output")]
    json: bool,
    /// Unix socket of this guest's agent; 'run' creates it
    #[arg(
        long,
        global = true,
        value_name = "PATH",
        default_value = SOCKET,
        help_heading = "Paths"
    )]
    socket: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the agent of this guest in the foreground
    ///
    /// The agent waits for the port and for the host, and reconnects when they return. Start it at
    /// boot, and restart it if it exits. As root the agent locks its memory (some MiB), and the
    /// kernel kills it last when memory runs out. A new agent cleans up after a killed one.
    ///
    /// Memory that virtio-mem adds is unusable until it is online. If the kernel's policy
    /// (/sys/devices/system/memory/auto_online_blocks) leaves it offline, the agent changes the
    /// policy. The agent also brings offline memory online when the host checks.
    #[command(after_help = manual::SHORT, after_long_help = manual::RUN)]
    Run {
        /// Zone for added memory
        ///
        /// 'movable': only for programs and caches, so that the guest can give it back. 'kernel':
        /// also for the kernel, which may never give it back. 'leave': another program, such as
        /// udev, brings memory online.
        #[arg(
            long,
            value_enum,
            default_value_t,
            hide_possible_values = true,
            value_name = "movable|kernel|leave",
            help_heading = "Memory"
        )]
        online: Online,
        /// Group that may send requests; by default only root may
        ///
        /// Write the group's name or number.
        #[arg(long, value_name = "GROUP", help_heading = "Security")]
        socket_group: Option<String>,
        /// Character device or unix socket to open as the port
        ///
        /// By default the agent finds the port org.aquifer.guest.0 by its name.
        #[arg(long, value_name = "PATH", help_heading = "Paths")]
        port: Option<PathBuf>,
    },
    /// Request memory from the host, or give some back
    ///
    /// The command waits for the answer. It prints by how much the guest grew or shrank, how much
    /// is missing, and why. Memory moves in whole blocks of some MiB; the guest never ends up with
    /// less than requested. The guest gives back only memory that programs do not use and that the
    /// kernel can move.
    #[command(after_help = manual::SHORT, after_long_help = manual::REQUEST)]
    Request {
        /// Size to grow by (+512M, 1G), or to shrink by (-512M)
        #[arg(value_name = "+SIZE|-SIZE", allow_hyphen_values = true)]
        change: Change,
        /// How long to wait for the answer: 500ms, 10s, 2m
        #[arg(
            long,
            value_name = "TIME",
            default_value = "10s",
            value_parser = wait,
            help_heading = "Timeouts"
        )]
        wait: Duration,
        /// Purpose to record in the host's log
        #[arg(long, value_name = "TEXT", default_value = "", help_heading = "Output")]
        why: String,
    },
    /// Show the connection to the host and the guest's memory
    #[command(after_help = manual::SHORT, after_long_help = manual::SHOW)]
    Show,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let client = Client::at(&arguments.socket);
    let done = match arguments.command {
        Command::Run { online, socket_group, port } => {
            let options = Options {
                port,
                socket: arguments.socket,
                socket_group,
                online,
                ..Options::default()
            };
            let Err(error) = agent::run(options);
            return failed(&format!("cannot run the agent: {error}"), arguments.json);
        }
        Command::Request { change, wait, why } => change.ask(&client, wait, &why).map(|granted| {
            view::granted(&granted, change, arguments.json);
            granted.missing.0 == 0
        }),
        Command::Show => client.show().map(|status| {
            view::status(&status, arguments.json);
            true
        }),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => failed(&error, arguments.json),
    }
}

/// Writes an error to standard error and returns the exit code of a failure.
fn failed(error: &dyn Display, json: bool) -> ExitCode {
    eprintln!("{}", complaint(error, json));
    ExitCode::FAILURE
}

/// Returns an error as a line of text, or as one JSON object.
fn complaint(error: &dyn Display, json: bool) -> String {
    if json {
        return serde_json::json!({ "error": error.to_string() }).to_string();
    }
    format!("aquifer-guest: {error}")
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    /// Calls `with` for this command and each subcommand.
    fn each(command: &clap::Command, with: &mut dyn FnMut(&clap::Command)) {
        with(command);
        command.get_subcommands().for_each(|part| each(part, with));
    }

    #[test]
    fn help_has_headed_options_and_no_final_periods() {
        let mut whole = Arguments::command();
        whole.build();
        let mut seen = 0;
        each(&whole, &mut |command| {
            let is_own = |it: &&clap::Arg| !["help", "version"].contains(&it.get_id().as_str());
            let own: Vec<_> = command.get_arguments().filter(is_own).collect();
            for option in own.iter().filter(|argument| !argument.is_positional()) {
                assert!(option.get_help_heading().is_some(), "{option} needs a heading");
            }
            let summaries =
                own.iter().map(|argument| argument.get_help()).chain([command.get_about()]);
            for summary in summaries {
                let text = summary.expect("it has a summary").to_string();
                assert!(!text.ends_with('.') && !text.is_empty(), "'{text}'");
                seen += 1;
            }
            let help = command.clone().render_long_help().to_string();
            assert!(help.contains("\nExamples:\n") && help.contains("\nExit status:\n"), "{help}");
        });
        assert!(seen > 12, "{seen} summaries");
    }

    #[test]
    fn a_failure_is_one_line_or_one_json_object() {
        assert_eq!(complaint(&"no \"agent\"", false), "aquifer-guest: no \"agent\"");
        let object: serde_json::Value =
            serde_json::from_str(&complaint(&"no \"agent\"", true)).unwrap();
        assert_eq!(object, serde_json::json!({ "error": "no \"agent\"" }));
    }
}
