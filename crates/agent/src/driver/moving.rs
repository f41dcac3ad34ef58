//! Drains that outlive an agent, and moves of VMs.

use std::fs;
use std::io;
use std::path::PathBuf;

use aquifer_control::node::{Input, Threshold};
use aquifer_page::{HostName, RegionName};

use super::Driver;

impl Driver {
    /// Begins or ends a drain. If the VMs are part of it, it also applies to the next agent.
    pub(super) fn drain(&mut self, on: bool, vms: bool) {
        if vms && let Err(error) = self.record_drain(on) {
            let path = self.drain_mark();
            tracing::warn!(
                "cannot record the drain for the next agent at {}: {error}",
                path.display()
            );
        }
        let stored = self.parts.lender.stored();
        self.input(Input::Drain { on, stored, vms });
    }

    /// Goes on with the drain of the previous agent, if that drained.
    pub(super) fn resume_drain(&mut self) {
        if self.drain_mark().exists() {
            tracing::info!("goes on draining, as the previous agent did");
            self.drain(true, true);
        }
    }

    fn drain_mark(&self) -> PathBuf {
        self.parts.config.state.join("draining")
    }

    fn record_drain(&self, on: bool) -> io::Result<()> {
        let path = self.drain_mark();
        match on {
            true => fs::write(path, ""),
            false => match fs::remove_file(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                removed => removed,
            },
        }
    }

    pub(super) fn look_at_vms(&self) {
        let vms = self.parts.vms.clone();
        self.later(move || Input::Vms(vms.readings()));
    }

    pub(super) fn move_vm(&self, vm: RegionName, avoid: Option<HostName>, below: Threshold) {
        let (vms, ends) = (self.parts.vms.clone(), self.ends.clone());
        tokio::spawn(async move {
            let end = vms.move_away(&vm, avoid, below).await;
            ends.send(Input::MoveEnded { vm, end })
        });
    }
}
