//! The command `testbed run`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use aquifer_testbed::{Shell as _, Testbed};
use clap::Args;

use crate::specs::Hardware;

/// Boot a host and run a shell script on it
///
/// Prints the script's output and exits with the script's exit code. If the host stops or the
/// timeout ends, prints the end of the console and exits with 125.
///
/// Example: testbed run --kernel 6.1 --module nbd --file target/debug/aquifer:/bin/aquifer SCRIPT
#[derive(Debug, Args)]
pub(crate) struct Run {
    #[command(flatten)]
    hardware: Hardware,
    /// Timeout of the script
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    timeout: u64,
    /// Also print the host's console
    #[arg(long)]
    console: bool,
    /// A script for busybox's sh
    script: PathBuf,
    /// Its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

impl Run {
    pub(crate) fn run(self) -> Result<ExitCode> {
        let spec =
            self.hardware.spec("host").file(&self.script, "/script").live_console(self.console);
        let hosts = Testbed::start([spec])?;
        let mut command = "exec sh /script".to_owned();
        for argument in &self.arguments {
            command = command + " " + &aquifer_testbed::quoted(argument);
        }
        let script = hosts["host"].spawn(&command)?;
        script.end_input();
        let code = script.pass_on(
            Duration::from_secs(self.timeout),
            std::io::stdout(),
            std::io::stderr(),
        )?;
        Ok(crate::exit_code(code))
    }
}
