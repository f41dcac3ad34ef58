//! A host of the demo: a network namespace and an agent that takes VMs in.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use aquifer_cli::failure::{Failure, OrFail, Result};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::netns::Namespace;
use crate::process::{Process, Site};
use crate::program;
use crate::wait::Wait;

/// How long an agent may take until it answers.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A host; its drop ends its agent.
#[derive(Debug)]
pub(super) struct Host {
    name: &'static str,
    dir: PathBuf,
    agent: Process,
}

impl Host {
    /// Starts the agent, which takes VMs in, and neither lends nor borrows.
    pub(super) fn start(name: &'static str, site: &Site<'_>, qemu: &Path) -> Result<Self> {
        let sections = format!(
            "[vms]\naccept = true\nqemu = \"{}\"\n\
             [lend]\nenabled = false\n[borrow]\nenabled = false",
            qemu.display()
        );
        let agent = Process::start(&mut site.agent(&sections)?, "an agent")?;
        Ok(Self { name, dir: site.files(), agent })
    }

    /// Runs `aquifer` on the host and returns the answer.
    pub(super) fn aquifer<T: DeserializeOwned>(
        &self,
        namespace: &Namespace,
        words: &[&str],
    ) -> Result<T> {
        let what =
            || format!("'aquifer {}' on host {}", words[..words.len().min(3)].join(" "), self.name);
        let mut command = Command::new(program::aquifer()?);
        command.arg("--json").args(words).env("AQUIFER_RUN_DIR", &self.dir).stdin(Stdio::null());
        namespace.enter(&mut command)?;
        let output = command.output().or_fail(what)?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(Failure::new(
                what(),
                if said.is_empty() { output.status.to_string() } else { said },
            ));
        }
        serde_json::from_slice(&output.stdout).or_fail(what)
    }

    pub(super) fn wait_until_ready(&mut self, namespace: &Namespace, wait: Wait<'_>) -> Result<()> {
        let what = format!("starting the agent of host {}", self.name);
        wait.until(&what, TIMEOUT, || {
            if self.agent.ended().is_some() {
                let log = fs::read_to_string(self.dir.join("agent.log")).unwrap_or_default();
                return Err(Failure::new(
                    what.clone(),
                    log.lines().last().unwrap_or("it says nothing"),
                ));
            }
            Ok(self.aquifer::<Value>(namespace, &["status"]).ok())
        })?;
        Ok(())
    }
}
