//! A guest's first process, and the one that runs in it what the testbed asks for.
//!
//! The first process mounts, loads modules, starts this program once more, to serve, and reaps orphans for as long as that
//! lives. It is in the initramfs of every guest, as `/init`.

mod boot;
mod serve;

use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result};
use aquifer_testbed::sys::lock_memory;
use rustix::process::{Pid, WaitOptions, getpid, wait};
use rustix::system::{RebootCommand, reboot};

fn main() -> ExitCode {
    let result = match getpid() {
        Pid::INIT => init(),
        _ if std::env::args().nth(1).as_deref() == Some("serve") => serve::run(),
        _ => {
            eprintln!(
                "testbed-guest runs only as the first process of a guest: see testbed/README.md"
            );
            return ExitCode::from(2);
        }
    };
    if let Err(error) = result {
        eprintln!("testbed-guest: {error:#}");
    }
    if getpid() == Pid::INIT {
        // Without its first process the kernel would panic; the console has said why.
        let _ = reboot(RebootCommand::PowerOff);
    }
    ExitCode::FAILURE
}

fn init() -> Result<()> {
    // Swap may go away for good; a page of this process that was there would take the host with it.
    lock_memory().context("cannot lock memory")?;
    boot::prepare()?;
    let server = Command::new("/init").arg("serve").spawn().context("cannot start /init serve")?;
    let server = Pid::from_child(&server);
    loop {
        match wait(WaitOptions::empty()).context("cannot wait for processes")? {
            Some((pid, status)) if pid == server => {
                anyhow::bail!("the process that runs commands is gone ({status:?})")
            }
            _ => {}
        }
    }
}
