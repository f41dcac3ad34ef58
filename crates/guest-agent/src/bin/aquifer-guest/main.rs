//! The command `aquifer-guest`: a guest's agent, and the client that sends requests to it.

mod size;
mod view;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use aquifer_guest_agent::agent::{self, Options};
use aquifer_guest_agent::{Client, Online, RequestError, SOCKET};
use clap::{Parser, Subcommand};

use size::{Change, wait};

/// Has a guest's memory grow and shrink with its need.
///
/// It runs in a virtual machine whose host runs Aquifer. 'aquifer-guest run' is the agent, one a guest, started at boot as root. It tells
/// the host how much memory the guest has and needs, asks for more at once when memory runs out, and brings online what the host adds. With
/// it running, programs and people in the guest may ask for memory before they need it, and give it back: 'aquifer-guest request'.
///
/// Host and agent speak over the virtio-serial port org.aquifer.guest.0, and the guest's memory is resized by virtio-mem: its kernel needs
/// the drivers virtio_console and virtio_mem (Linux 5.8 or later), and for asking as soon as tasks wait for memory, PSI (psi=1 on
/// the kernel's command line, where that is not the default).
#[derive(Debug, Parser)]
#[command(name = "aquifer-guest", version, max_term_width = 110)]
struct Arguments {
    /// Answer in JSON, one object.
    #[arg(long, global = true)]
    json: bool,
    /// The agent's socket.
    #[arg(long, global = true, value_name = "PATH", default_value = SOCKET)]
    socket: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Be the agent of this guest; does not end.
    ///
    /// It waits for the host's port, and for the host, for as long as they are not there, and again when they go: start it at boot, and
    /// again whenever it ends. As root it locks its memory (some MiB) and is among the last that the kernel kills when memory runs out.
    /// One that was killed leaves nothing that the next does not remove.
    ///
    /// Memory that virtio-mem adds is of no use until it is online. If the kernel would leave it offline
    /// (/sys/devices/system/memory/auto_online_blocks), the agent has it bring all such memory online from now on; whenever the host checks,
    /// it brings online what is not.
    Run {
        /// As what memory is brought online.
        ///
        /// 'movable': for programs and caches only, so that it can be given back. 'kernel': for the kernel too, which may never give it
        /// back. 'leave': somebody else does it, for example udev.
        #[arg(
            long,
            value_enum,
            default_value_t,
            hide_possible_values = true,
            value_name = "movable|kernel|leave"
        )]
        online: Online,
        /// A group, by name or number, whose members may ask for memory; else only root may.
        #[arg(long, value_name = "GROUP")]
        socket_group: Option<String>,
        /// The host's port: a character device or a unix socket. If not given, the port org.aquifer.guest.0 is found by its name.
        #[arg(long, value_name = "PATH")]
        port: Option<PathBuf>,
    },
    /// Ask the host for more memory, or give some back.
    ///
    /// Waits for the answer, and says by how much the guest has grown or shrunk, what is missing, and why. Memory comes and goes in
    /// whole pieces of some MiB: the guest never has less than what was asked for would leave it. Memory can be given back only
    /// where programs need it no more; what the kernel cannot move stays.
    ///
    /// Ends with 0 if all was granted, and with 1 otherwise.
    #[command(
        after_help = "Examples:\n  aquifer-guest request +2G --why 'nightly index' && build-index\n  aquifer-guest request -2G"
    )]
    Request {
        /// How much more (+512M, 1G) or less (-512M).
        #[arg(value_name = "+SIZE|-SIZE", allow_hyphen_values = true)]
        change: Change,
        /// For how long to wait: 500ms, 10s, 2m.
        #[arg(long, value_name = "TIME", default_value = "10s", value_parser = wait)]
        wait: Duration,
        /// What for, for the host's log.
        #[arg(long, value_name = "TEXT", default_value = "")]
        why: String,
    },
    /// Show what the agent sees: whether the host is there, and this guest's memory.
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
            eprintln!("aquifer-guest: cannot run: {error}");
            return ExitCode::FAILURE;
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

fn failed(error: &RequestError, json: bool) -> ExitCode {
    if json {
        println!("{}", serde_json::json!({ "error": error.to_string() }));
    }
    eprintln!("aquifer-guest: {error}");
    ExitCode::FAILURE
}
