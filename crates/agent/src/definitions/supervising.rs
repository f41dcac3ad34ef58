//! Another supervisor for each VM that has lost its own.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::RegionName;
use aquifer_vm::process::{Files, client};

use crate::config::Config;
use crate::driver::Journal;

/// How long the agent waits until it tries again for the same VM.
const AGAIN: Duration = Duration::from_secs(10);

/// The supervisors that this agent has started.
#[derive(Debug)]
pub(super) struct Supervising {
    exe: PathBuf,
    run_dir: PathBuf,
    journal: Journal,
    /// The latest attempts.
    tried: BTreeMap<RegionName, Instant>,
}

impl Supervising {
    pub(super) fn new(config: &Config, exe: PathBuf, journal: Journal) -> Self {
        Self { exe, run_dir: config.state.clone(), journal, tried: BTreeMap::new() }
    }

    /// Looks at all VMs. Starts supervisors in threads of their own, as a QEMU may answer late.
    pub(super) fn step(&mut self) {
        self.tried.retain(|_, at| at.elapsed() < AGAIN);
        let vms = client::list(&self.run_dir).unwrap_or_else(|error| {
            tracing::debug!("cannot list the VMs: {error}");
            Vec::new()
        });
        for files in vms.into_iter().filter(Files::lacks_supervisor) {
            let name = files.name().clone();
            if self.tried.contains_key(&name) {
                continue;
            }
            self.tried.insert(name.clone(), Instant::now());
            if let Err(error) = self.begin(files) {
                tracing::warn!(vm = %name, "cannot start a thread for a supervisor: {error}");
            }
        }
    }

    fn begin(&self, files: Files) -> io::Result<()> {
        let (exe, journal, name) = (self.exe.clone(), self.journal.clone(), files.name().clone());
        thread::Builder::new().name("supervisor".to_owned()).spawn(
            move || match client::supervise(&exe, &files) {
                Ok(()) => {
                    let what =
                        format!("starts another supervisor for VM {name}: the last one died");
                    tracing::info!(vm = %name, "{what}");
                    journal.decided_about(&name, what);
                }
                Err(error) => {
                    tracing::warn!(vm = %name, "cannot start another supervisor: {error}");
                }
            },
        )?;
        Ok(())
    }
}
