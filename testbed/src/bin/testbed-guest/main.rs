//! A guest's first process, and the process that runs the testbed's commands in it.
//!
//! The first process mounts file systems, loads modules, starts this program again to serve, and
//! reaps orphans until the server ends. Every guest's initramfs has this program as `/init`.

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
            eprintln!("testbed-guest runs only as process 1 of a guest: see testbed/README.md");
            return ExitCode::from(2);
        }
    };
    if let Err(error) = result {
        eprintln!("testbed-guest: {error:#}");
    }
    if getpid() == Pid::INIT {
        // Without its first process the kernel would panic; the console shows the error.
        let _ = reboot(RebootCommand::PowerOff);
    }
    ExitCode::FAILURE
}

fn init() -> Result<()> {
    // Swap may be lost for good; a page of this process in it would take the whole host along.
    lock_memory().context("cannot lock memory")?;
    boot::prepare()?;
    let server = Command::new("/init").arg("serve").spawn().context("cannot start /init serve")?;
    let server = Pid::from_child(&server);
    loop {
        match wait(WaitOptions::empty()).context("cannot wait for processes")? {
            Some((pid, status)) if pid == server => {
                anyhow::bail!("the process that runs commands has ended ({status:?})")
            }
            _ => {}
        }
    }
}
