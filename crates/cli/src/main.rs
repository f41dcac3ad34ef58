//! The binary `aquifer`.

use std::process::ExitCode;

fn main() -> ExitCode {
    aquifer_cli::main()
}
