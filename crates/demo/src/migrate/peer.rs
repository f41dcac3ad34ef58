//! The competitor: QEMU by itself, which copies all of the guest's memory while the guest runs
//! (pre-copy).

use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use aquifer_cli::failure::{Failure, OrFail, Result};
use aquifer_hosts::Namespace;
use aquifer_page::PAGE_SIZE;
use aquifer_vm::Qmp;
use serde_json::{Value, json};

use super::MACHINE;
use super::report::Move;
use super::stage::Boot;
use crate::process::{Process, failure};
use crate::wait::Wait;

const PORT: u16 = 7080;

/// How long QEMU may take to answer.
const TIMEOUT: Duration = Duration::from_secs(20);

/// How long QEMU may take to move the guest.
const MOVING: Duration = Duration::from_secs(180);

/// A QEMU on one of the hosts.
#[derive(Debug)]
pub(super) struct Qemu {
    process: Process,
    qmp: Qmp,
}

/// Returns the path of the guest's serial port on a host.
pub(super) fn serial(dir: &Path, host: &str) -> PathBuf {
    dir.join(format!("{host}.serial"))
}

impl Qemu {
    /// Starts QEMU in a namespace; with `waits` it waits for the incoming guest.
    pub(super) fn start(
        dir: &Path,
        host: &str,
        on: &Namespace,
        boot: &Boot,
        waits: bool,
        wait: Wait<'_>,
    ) -> Result<Self> {
        let what = || format!("starting QEMU on host {host}");
        let control = dir.join(format!("{host}.qmp"));
        let mut command = Command::new(&boot.qemu);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-machine", MACHINE]);
        command
            .args(boot.accelerator.arguments())
            .args(["-m", &format!("{}M", boot.memory.0 >> 20)]);
        command
            .arg("-kernel")
            .arg(&boot.kernel)
            .arg("-initrd")
            .arg(&boot.initrd)
            .args(["-append", &boot.append]);
        command
            .args(["-serial", &format!("unix:{},server=on,wait=off", serial(dir, host).display())]);
        command.args(["-qmp", &format!("unix:{},server=on,wait=off", control.display())]);
        if waits {
            command.args(["-incoming", &format!("tcp:{}:{PORT}", on.address())]);
        }
        let log = dir.join(format!("{host}.log"));
        let output = File::create(&log).or_fail(what)?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(output);
        on.enter(&mut command).map_err(failure)?;
        let mut process = Process::start(&mut command, "QEMU")
            .map_err(|failure| failure.help("apt-get install qemu-system-x86"))?;
        let qmp = wait.until(&what(), TIMEOUT, || match process.ended() {
            Some(end) => {
                let said = fs::read_to_string(&log).unwrap_or_default();
                Err(Failure::new(what(), format!("it ended with {end}: {}", said.trim())))
            }
            // QEMU makes the socket before it listens on it.
            None => Ok(Qmp::connect(&control, TIMEOUT).ok()),
        })?;
        Ok(Self { process, qmp })
    }

    fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.qmp.execute(command, arguments).or_fail(|| "moving a guest by QEMU itself")
    }

    /// Moves the guest to the QEMU that waits for it.
    ///
    /// Returns QEMU's figures, and how many bytes of the guest's memory are not zero.
    pub(super) fn migrate(
        &mut self,
        to: &mut Self,
        address: Ipv4Addr,
        wait: Wait<'_>,
    ) -> Result<(Move, u64)> {
        let what = "moving a guest by QEMU itself";
        for qemu in [&mut *self, to] {
            // No bandwidth limit, as for our move.
            qemu.execute(
                "migrate-set-parameters",
                json!({ "max-bandwidth": 1_u64 << 40, "downtime-limit": 300 }),
            )?;
        }
        self.execute("migrate", json!({ "uri": format!("tcp:{address}:{PORT}") }))?;
        let moved = wait.until(what, MOVING, || {
            if let Some(end) = self.process.ended() {
                return Err(Failure::new(what, format!("QEMU ended with {end}")));
            }
            let is = self.execute("query-migrate", json!({}))?;
            match is["status"].as_str() {
                Some("completed") => Ok(Some(is)),
                Some("failed" | "cancelled") => Err(Failure::new(what, format!("QEMU says: {is}"))),
                _ => Ok(None),
            }
        })?;
        let ram = |key: &str| moved["ram"][key].as_u64().unwrap_or_default();
        let page = PAGE_SIZE as u64;
        let footprint = ram("total").saturating_sub(ram("duplicate") * page);
        let sent = ram("normal") * page;
        let line = Move {
            total_ms: moved["total-time"].as_f64().unwrap_or_default(),
            downtime_ms: moved["downtime"].as_f64().unwrap_or_default(),
            silence_ms: 0.0,
            bytes_pages: sent,
            bytes_pool: 0,
            bytes_metadata: ram("transferred").saturating_sub(sent),
            rounds: ram("dirty-sync-count"),
            mode: "qemu-precopy".to_owned(),
            resident_pages: footprint / page,
            dirty_pages: footprint / page,
        };
        Ok((line, footprint))
    }
}
