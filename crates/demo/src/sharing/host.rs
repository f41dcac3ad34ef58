//! A host of the demo, with a cgroup as its machine.

use std::fs;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_blockdev::process::client;
use aquifer_cli::cgroup::Cgroup;
use aquifer_cli::failure::{Failure, Result};
use aquifer_page::Bytes;
use rustix::process::Signal;

use super::{OVERLOAD, THRESHOLDS};
use crate::process::failure;
use crate::stores;

/// How long an agent may take to end.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A host; its drop ends its agent and the processes in its cgroup.
#[derive(Debug)]
pub(super) struct Host {
    host: aquifer_hosts::Host,
    cgroup: Arc<Cgroup>,
}

impl Host {
    /// Starts the agent, which manages `cgroup`.
    pub(super) fn start(host: aquifer_hosts::Host, cgroup: Cgroup, memory: Bytes) -> Result<Self> {
        let (upper, lower) = THRESHOLDS;
        let sections = format!(
            r#"[memory]
cgroup = "{cgroup}"
gate_swap = true
period = "100ms"
upper = {upper}
lower = {lower}
[borrow]
request = {request}
max = "16G"
spill = "{dir}/spill""#,
            cgroup = cgroup.path().display(),
            request = memory.scaled(OVERLOAD - 1.0 + 1.0 / 6.0).0,
            dir = host.dir().display(),
        );
        host.set(&sections).map_err(failure)?;
        let host = Self { host, cgroup: Arc::new(cgroup) };
        // On SIGINT an agent gives back the memory that it borrowed, so a killed demo leaves no
        // swap.
        let dies = |command: &mut _| aquifer_cli::sys::signal_with_parent(command, Signal::INT);
        host.host.start(dies).map_err(failure)?;
        Ok(host)
    }

    pub(super) fn cgroup(&self) -> &Arc<Cgroup> {
        &self.cgroup
    }

    /// Sends SIGINT and waits until the agent has given back borrowed memory and ended.
    pub(super) fn end(self) -> Result<()> {
        let _ = self.signal(Signal::INT);
        let deadline = Instant::now() + TIMEOUT;
        while self.check().is_ok() {
            if Instant::now() > deadline {
                let what = format!("running the agent of host {}", self.name());
                return Err(Failure::new(what, format!("it does not end\n{}", self.log_tails(12))));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Deref for Host {
    type Target = aquifer_hosts::Host;

    fn deref(&self) -> &aquifer_hosts::Host {
        &self.host
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // The load first: its swapped pages then need not be read back.
        let _ = self.cgroup.kill_all();
        self.host.end(TIMEOUT);
        end_volumes(&self.state());
    }
}

/// Detaches the volumes that an agent left.
fn end_volumes(state: &Path) {
    if let Ok(volumes) = client::list(state) {
        for volume in volumes {
            // A living volume swaps its pages back first. The load is dead, so there are few.
            let _ =
                client::detach(state, volume, |_| ()).or_else(|_| client::clean_up(state, volume));
        }
    }
}

/// Removes the remains of a killed demo's hosts; their agents have ended with it.
pub(super) fn clean_up(dir: &Path) {
    for name in ["a", "b"] {
        end_volumes(&dir.join(name).join("state"));
    }
    let _ = fs::remove_dir_all(stores(dir));
}
