//! The least program that can serve volumes: what the hidden subcommand of a program does, and nothing else.

use std::process::ExitCode;

fn main() -> ExitCode {
    aquifer_device::process::run()
}
