//! Programs that need memory: `checked-memory` derives every page from a seed, and checks it.

use anyhow::{Result, ensure};
use aquifer_page::Bytes;
use aquifer_testbed::{Output, Process, Shell};

use super::TIMEOUT;

/// A program that fills memory in a host, then checks and rewrites pages at random, then waits.
#[derive(Debug)]
pub struct Load {
    process: Process,
    bytes: Bytes,
}

impl Load {
    /// Starts a load that makes `accesses` random accesses once its memory is filled.
    pub fn start(host: &impl Shell, bytes: Bytes, accesses: u64) -> Result<Self> {
        Ok(Self {
            process: host.spawn(&format!("exec checked-memory {} {accesses}", bytes.0))?,
            bytes,
        })
    }

    /// Waits until the load has filled its memory.
    pub fn filled(&self) -> Result<()> {
        self.process.wait_for("filled_pages", TIMEOUT).map(|_| ())
    }

    /// Makes the load repeat its random accesses.
    pub fn again(&self) {
        self.process.write("access\n");
    }

    /// Waits until the load has made its accesses.
    pub fn is_done(&self) -> Result<()> {
        self.process.wait_for("accesses", TIMEOUT).map(|_| ())
    }

    /// Makes the load check every byte of every page.
    pub fn verify(&self) -> Result<()> {
        self.process.write("verify\n");
        let verdict = self.process.wait_for("verified_pages", TIMEOUT)?;
        let verdict: serde_json::Value = serde_json::from_str(&verdict)?;
        let good = verdict["verified_pages"] == self.bytes.pages() && verdict["wrong"] == 0;
        ensure!(good, "of {} pages: {verdict}", self.bytes.pages());
        Ok(())
    }

    /// Ends the load, which frees its memory.
    pub fn end(self) -> Result<()> {
        self.process.end_input();
        let end = self.process.output(TIMEOUT)?;
        ensure!(end.success(), "the load ended with {}: {}", end.code, end.stderr);
        Ok(())
    }

    /// Tells whether the load has not ended.
    pub fn is_running(&self) -> bool {
        self.process.is_running()
    }

    /// Waits for the end of a load that the kernel kills.
    pub fn killed(&self) -> Result<Output> {
        self.process.output(TIMEOUT)
    }
}
