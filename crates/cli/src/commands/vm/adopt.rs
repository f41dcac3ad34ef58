//! `aquifer vm adopt`.

use std::path::{Path, PathBuf};

use aquifer_vm::memory::UNLIMITED;
use aquifer_vm::process::{Files, client};
use aquifer_page::RegionName;
use clap::Args;

use super::limits::Bounds;
use crate::commands::Common;
use crate::failure::{OrFail, Result};
use crate::output;

/// Has a VM that somebody else has started be resized here
///
/// Its QEMU needs a virtio-mem device, and a monitor (QMP) at a unix socket that nobody else is connected to: '-qmp unix:PATH,server=on,wait=off', beside
/// those that others use. It is resized, balanced and counted as those of 'aquifer vm start'; 'aquifer vm release' has it be as before.
#[derive(Debug, Args)]
pub struct Adopt {
    /// What it is called here
    name: RegionName,
    /// The socket of its monitor
    #[arg(long, value_name = "SOCKET")]
    qmp: PathBuf,
    /// The socket of its virtio-serial port 'org.aquifer.guest.0', if it has one, where 'aquifer-guest run' in it is heard
    #[arg(long, value_name = "SOCKET")]
    agent: Option<PathBuf>,
    #[command(flatten)]
    bounds: Bounds,
}

impl Adopt {
    pub(super) fn run(self, common: &Common, run_dir: &Path) -> Result<()> {
        let what = || format!("adopting a VM as '{}'", self.name);
        let absolute = |path: &Path| std::path::absolute(path).or_fail(what);
        let qmp = absolute(&self.qmp)?;
        let agent = self.agent.as_deref().map(absolute).transpose()?;
        let exe = std::env::current_exe().or_fail(what)?;
        let sockets = (&*qmp, agent.as_deref());
        let adopted =
            client::adopt(&exe, run_dir, &self.name, sockets, &self.bounds.over(UNLIMITED));
        let status = adopted.or_fail(what)?;
        output::answer(common.json, &status, |status| {
            super::text(&Files::new(run_dir, &self.name), status)
        })
    }
}
