//! The binary `aquifer-demo`.

use std::process::ExitCode;

fn main() -> ExitCode {
    aquifer_demo::main()
}
