//! `aquifer vm adopt`.

use std::path::{Path, PathBuf};

use aquifer_page::RegionName;
use aquifer_vm::memory::UNLIMITED;
use aquifer_vm::process::{Files, client};
use clap::Args;

use super::limits::Bounds;
use crate::commands::Common;
use crate::failure::{OrFail, Result};
use crate::output;

/// Adopt a VM that another program started
///
/// Aquifer then resizes, balances and accounts for it as for a VM of 'aquifer vm start', until
/// 'aquifer vm forget'.
///
/// Its QEMU needs a virtio-mem device, and a QMP monitor at a unix socket that nothing else uses:
/// '-qmp unix:PATH,server=on,wait=off'.
#[derive(Debug, Args)]
pub struct Adopt {
    /// Name of the VM here
    name: RegionName,
    /// Unix socket of its QMP monitor
    #[arg(long, value_name = "SOCKET")]
    qmp: PathBuf,
    /// Unix socket of its guest agent's virtio-serial port
    ///
    /// The port is 'org.aquifer.guest.0', and 'aquifer-guest run' in the guest uses it. Default:
    /// no guest agent.
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
