//! The command `testbed exec`.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use aquifer_testbed::wire::{Frame, Kind};
use clap::Args;

/// Run a shell command, or another order, on a host
///
/// 'testbed up' runs the hosts; its help lists the orders. The exit code is the command's. The
/// command has no standard input.
///
/// Examples: testbed exec a 'ping -c 1 b; dmesg | tail'     testbed exec unplug b
#[derive(Debug, Args)]
pub(crate) struct Exec {
    /// Socket on which 'testbed up' listens
    #[arg(long, value_name = "PATH", default_value_os_t = default_socket())]
    socket: PathBuf,
    /// HOST COMMAND, or cut, mend, unplug, boot or console HOST
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ORDER"
    )]
    order: Vec<String>,
}

impl Exec {
    pub(crate) fn run(self) -> Result<ExitCode> {
        let socket = self.socket.display();
        let mut stream = UnixStream::connect(&self.socket).with_context(|| {
            format!("no hosts are up at {socket}: start some with 'testbed up'")
        })?;
        Frame::new(0, Kind::Start, self.order.join(" ")).send(&stream)?;
        loop {
            let frame =
                Frame::receive(&mut stream).context("'testbed up' closed the connection")?;
            match frame.kind {
                Kind::Output => std::io::stdout().write_all(&frame.data)?,
                Kind::Error => std::io::stderr().write_all(&frame.data)?,
                Kind::Exit => return Ok(crate::exit_code(frame.exit_code())),
                _ => bail!("{}", String::from_utf8_lossy(&frame.data)),
            }
        }
    }
}

/// Returns the socket of `up` unless an argument names another.
pub(crate) fn default_socket() -> PathBuf {
    let dir = std::env::var_os("XDG_RUNTIME_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    dir.join("aquifer-testbed.sock")
}
