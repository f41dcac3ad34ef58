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

/// Run Linux hosts for tests as QEMU guests
///
/// Hosts boot Debian's stock kernels. A virtual switch without uplink joins them. A host contains
/// busybox and the files that --file names, with their shared libraries. Its file system is in its
/// RAM. A host boots in a few seconds; without KVM, QEMU emulates it. When this command ends,
/// nothing of the hosts is left.
#[derive(Debug, Parser)]
#[command(name = "testbed", version, max_term_width = 110)]
struct Testbed {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Download kernels and print their paths
    ///
    /// Unpacks missing kernels into target/testbed. They come from the mirror that apt uses here;
    /// DEBIAN_MIRROR=URI names another. The other commands do this by themselves.
    Kernel {
        /// 6.1 (bookworm) or 6.12 (bookworm-backports); default: both
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
