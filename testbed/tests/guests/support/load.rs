//! Programs that need memory: `checked-memory`, whose every page follows from a seed and is checked.

use anyhow::{Result, ensure};
use aquifer_page::Bytes;
use aquifer_testbed::{Output, Process, Shell};

use super::PATIENCE;

/// A program that fills memory in a host, then checks and rewrites pages at random, then waits.
#[derive(Debug)]
pub struct Load {
    process: Process,
    bytes: Bytes,
}

impl Load {
    /// Starts one that makes so many random accesses once its memory is filled.
    pub fn start(host: &impl Shell, bytes: Bytes, accesses: u64) -> Result<Self> {
        Ok(Self {
            process: host.spawn(&format!("exec checked-memory {} {accesses}", bytes.0))?,
            bytes,
        })
    }

    /// Waits until all its memory is filled.
    pub fn filled(&self) -> Result<()> {
        self.process.wait_for("filled_pages", PATIENCE).map(|_| ())
    }

    /// Has it make its random accesses once more.
    pub fn again(&self) {
        self.process.write("access\n");
    }

    /// Waits until it has made its accesses.
    pub fn is_done(&self) -> Result<()> {
        self.process.wait_for("accesses", PATIENCE).map(|_| ())
    }

    /// Has it check every byte of every page.
    pub fn verify(&self) -> Result<()> {
        self.process.write("verify\n");
        let verdict = self.process.wait_for("verified_pages", PATIENCE)?;
        let verdict: serde_json::Value = serde_json::from_str(&verdict)?;
        let good = verdict["verified_pages"] == self.bytes.pages() && verdict["wrong"] == 0;
        ensure!(good, "of {} pages: {verdict}", self.bytes.pages());
        Ok(())
    }

    /// Has it end, and with it its memory.
    pub fn end(self) -> Result<()> {
        self.process.end_input();
        let end = self.process.output(PATIENCE)?;
        ensure!(end.success(), "the load ended with {}: {}", end.code, end.stderr);
        Ok(())
    }

    /// Whether it has not ended.
    pub fn is_running(&self) -> bool {
        self.process.is_running()
    }

    /// Waits for its end, which it did not choose.
    pub fn killed(&self) -> Result<Output> {
        self.process.output(PATIENCE)
    }
}
