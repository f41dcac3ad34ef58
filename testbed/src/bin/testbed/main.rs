//! `testbed`: hosts for experiments, from the command line.

mod exec;
mod orders;
mod parts;
mod run;
mod specs;
mod up;

use std::process::ExitCode;

use aquifer_testbed::Kernel;
use clap::{Parser, Subcommand};

/// Linux hosts to try things on: QEMU guests with Debian's stock kernels, joined by a switch that leads nowhere else
///
/// A host has busybox, what --file puts into it (with its shared libraries) and nothing else; its file system is in its RAM.
/// It boots in a few seconds, emulated where KVM cannot be had. Nothing is left of it when this command ends.
#[derive(Debug, Parser)]
#[command(name = "testbed", version, max_term_width = 110)]
struct Testbed {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Makes kernels ready to boot, and prints where they are
    ///
    /// Downloads and unpacks what was not before, into target/testbed, from the mirror that this machine's apt uses
    /// (DEBIAN_MIRROR=URI names another). The other commands do this by themselves.
    Kernel {
        /// 6.1 (bookworm) or 6.12 (bookworm-backports); all of them if none is named
        #[arg(value_name = "VERSION")]
        kernels: Vec<Kernel>,
    },
    Parts(parts::Parts),
    Run(run::Run),
    Up(up::Up),
    Exec(exec::Exec),
}

fn main() -> ExitCode {
    let result = match Testbed::parse().command {
        Command::Kernel { kernels } => kernel(&kernels),
        Command::Parts(parts) => parts.run(),
        Command::Run(run) => run.run(),
        Command::Up(up) => up.run(),
        Command::Exec(exec) => exec.run(),
    };
    result.unwrap_or_else(|error| {
        eprintln!("testbed: {error:#}");
        // Commands in hosts do not usually end with this code.
        ExitCode::from(125)
    })
}

fn kernel(kernels: &[Kernel]) -> anyhow::Result<ExitCode> {
    let kernels = if kernels.is_empty() { &Kernel::ALL } else { kernels };
    for kernel in kernels {
        let prepared = kernel.prepare()?;
        println!("{kernel}\t{}\t{}", prepared.release(), prepared.vmlinux().display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Converts the exit code of a command in a host to this command's own; 255 if it does not fit.
fn exit_code(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX))
}
