//! The command `testbed up`.

use std::fs;
use std::io::{self, BufRead as _, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;

use anyhow::{Context as _, Result, bail};
use aquifer_testbed::Testbed;
use aquifer_testbed::wire::{CHUNK, Frame, Kind};
use clap::Args;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::exec::default_socket;
use crate::orders::obey;
use crate::specs::Hardware;

/// Start hosts and run them until ctrl-C
///
/// The hosts are named a, b, c ... and reach each other by these names (10.77.0.1, 10.77.0.2 ...).
/// 'testbed exec HOST COMMAND' runs commands on them, as do lines on standard input:
///
///   HOST COMMAND      runs a command on a host;
///   cut HOST          cuts its link, and 'mend HOST' mends it;
///   unplug HOST       pulls its plug, and 'boot HOST' boots it again;
///   console HOST      prints its console output so far.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Up {
    /// Number of hosts
    #[arg(
        long,
        value_name = "N",
        default_value_t = 2,
        value_parser = clap::value_parser!(u8).range(1..=26)
    )]
    hosts: u8,
    #[command(flatten)]
    hardware: Hardware,
    /// Socket on which 'testbed exec' reaches the hosts
    #[arg(long, value_name = "PATH", default_value_os_t = default_socket())]
    socket: PathBuf,
}

impl Up {
    pub(crate) fn run(self) -> Result<ExitCode> {
        let mut signals =
            Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot wait for ctrl-C")?;
        let socket = Socket::bind(self.socket)?;
        let names = ('a'..='z').take(usize::from(self.hosts)).map(|name| name.to_string());
        let hosts = Arc::new(Testbed::start(names.map(|name| self.hardware.spec(&name)))?);
        for host in hosts.hosts() {
            println!("{host}\t{}", host.address());
        }
        println!("up until ctrl-C; 'testbed exec {} uname -a' runs a command", hosts.hosts()[0]);
        let listener = socket.listener.try_clone()?;
        let of_socket = hosts.clone();
        thread::spawn(move || {
            for caller in listener.incoming().map_while(Result::ok) {
                let hosts = of_socket.clone();
                thread::spawn(move || answer(&hosts, &caller));
            }
        });
        thread::spawn(move || {
            let lines = io::stdin().lock().lines().map_while(Result::ok);
            for line in lines.filter(|line| !line.trim().is_empty()) {
                match obey(&hosts, line.trim(), io::stdout(), io::stderr()) {
                    Ok(0) => {}
                    Ok(code) => eprintln!("(ended with {code})"),
                    Err(error) => eprintln!("{error:#}"),
                }
            }
        });
        // The hosts, and the commands in them, end with this process.
        signals.forever().next();
        Ok(ExitCode::SUCCESS)
    }
}

/// Obeys one caller of `testbed exec`; a caller that has hung up needs no answer.
fn answer(hosts: &Testbed, caller: &UnixStream) {
    let Ok(order) = Frame::receive(caller) else { return };
    let [out, err] = [Kind::Output, Kind::Error].map(|kind| Framed { caller, kind });
    let end = match obey(hosts, String::from_utf8_lossy(&order.data).trim(), out, err) {
        Ok(code) => Frame::new(0, Kind::Exit, code.to_le_bytes()),
        Err(error) => Frame::new(0, Kind::Failed, format!("{error:#}")),
    };
    let _ = end.send(caller);
}

/// A writer that sends its data as frames of one kind.
struct Framed<'a> {
    caller: &'a UnixStream,
    kind: Kind,
}

impl Write for Framed<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let data = &data[..data.len().min(CHUNK)];
        Frame::new(0, self.kind, data).send(self.caller)?;
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The socket that `testbed exec` calls; dropping it removes the file.
struct Socket {
    listener: UnixListener,
    path: PathBuf,
}

impl Socket {
    fn bind(path: PathBuf) -> Result<Self> {
        if UnixStream::connect(&path).is_ok() {
            bail!("another 'testbed up' listens at {}: pass another --socket", path.display());
        }
        // A killed process may have left its socket.
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path)
            .with_context(|| format!("cannot listen on {}", path.display()))?;
        Ok(Self { listener, path })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}
