//! The smallest program that can serve volumes: the hidden subcommand of `aquifer`, by itself.

use std::process::ExitCode;

fn main() -> ExitCode {
    aquifer_blockdev::process::run()
}
