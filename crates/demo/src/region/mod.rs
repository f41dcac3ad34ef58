//! `aquifer demo region`: memcached with its items in a region four times as large as its local
//! cache.
//!
//! Beside it, memcached with all its items in local RAM.
//!
//! Everything is real: Debian's unmodified memcached, an exporting process that lends, and a client
//! that speaks memcached's protocol and compares every byte of every value.

mod memcache;
mod picture;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_cli::commands::region::with_preload;
use aquifer_cli::failure::{OrFail, Result};
use aquifer_cli::lender::{ClaimedLender, Purpose, Trust};
use aquifer_cli::progress::Progress;
use aquifer_page::{Bytes, RegionName};
use aquifer_region::RegionError;
use aquifer_region::process::{Bucket, Files, RegionSpec, RegionStatus, client};
use serde::Serialize;

use crate::process::{self, Process};
use crate::program;
use crate::remove;
use crate::session::{DemoSession, Outcome};
use memcache::{Client, Load, Read};

/// The options of the demo.
#[derive(Debug)]
pub struct Options {
    /// The local cache in bytes; the region is four times as large.
    pub cache: Bytes,
    /// The directory of marks, sockets and logs while the demo runs.
    pub run_dir: PathBuf,
}

/// The output of `aquifer demo region --json`.
///
/// `faults` counts the fetches while the values were read back. The latencies and the histogram
/// cover all fetches since the engine's start.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Values written to memcached, and read back once each in random order.
    pub values_written: u64,
    /// Values that came back unchanged, byte for byte.
    pub values_verified: u64,
    /// Values that came back changed, or not at all.
    pub values_wrong: u64,
    /// Values that memcached did not have; part of `values_wrong`. It drops values when its memory
    /// is full.
    pub values_missing: u64,
    /// The memory of memcached.
    #[serde(flatten)]
    pub memory: Memory,
    /// Faults that fetched a page.
    pub faults: u64,
    /// The share of random reads that fetched no page, measured one by one at the end.
    ///
    /// A value may lie in two pages, and memcached touches other pages when it maintains its lists.
    pub hit_rate: f64,
    /// Median time of a fetch, in microseconds.
    pub fault_p50_us: f64,
    /// The 99th percentile of that time, in microseconds.
    pub fault_p99_us: f64,
    /// How fast values were read.
    #[serde(flatten)]
    pub throughput: Throughput,
    /// Fetches by the time that they took.
    pub histogram: Vec<Bucket>,
}

/// The memory of memcached, in [`Summary`].
#[derive(Clone, Debug, Serialize)]
pub struct Memory {
    /// Local RAM that the region may have, in bytes.
    pub local_bytes: Bytes,
    /// The region's size, in bytes.
    pub region_bytes: Bytes,
    /// Bytes of the region that were with the lender when reading began.
    pub remote_bytes: Bytes,
}

/// How fast values were read, in [`Summary`].
#[derive(Clone, Debug, Serialize)]
pub struct Throughput {
    /// Values read a second.
    pub reads_per_s: f64,
    /// Values read a second from memcached with all items in local RAM.
    pub local_reads_per_s: f64,
    /// `reads_per_s` divided by `local_reads_per_s`.
    pub throughput_ratio: f64,
}

/// The kind in the demo's mark.
const KIND: &str = "region-demo";
const REGION: &str = "items";

/// How many values are read for the hit rate.
const SAMPLES: u64 = 1000;

/// How long memcached may take until it listens.
const START: Duration = Duration::from_secs(10);

/// Runs the demo and removes all that it made.
///
/// # Errors
/// If this machine lacks a requirement, or if a step fails.
pub fn run(options: &Options) -> Result<Outcome<Summary>> {
    let session = DemoSession::begin(&options.run_dir, KIND, |dir, _| {
        clear(dir);
        Ok(())
    })?;
    let interrupted = &*session.interrupted;
    let stage = Stage { dir: session.dir.clone() };
    fs::create_dir_all(&stage.dir).or_fail(|| format!("making {}", stage.dir.display()))?;
    let size = Bytes(options.cache.0 * 4);
    let load = Load::filling(size);

    let progress = Progress::spinner("memcached with all in local RAM");
    let memcached = stage.memcached(size, None)?;
    let (local, _) = exercise(&stage, &load, interrupted, || Ok(()))?;
    drop((memcached, progress));

    let _progress =
        Progress::spinner(format!("memcached with {} of {size} in local RAM", options.cache));
    let _lender = process::lender(&stage.dir, size)?;
    let region = stage.region(size, options.cache)?;
    let status = || client::status(&region.0).or_fail(|| "asking the region's engine");
    let _memcached = stage.memcached(size, Some(&region.0))?;
    let (read, before) = exercise(&stage, &load, interrupted, status)?;
    let after = status()?;
    let hit_rate = hit_rate(&stage, &load, interrupted, || Ok(status()?.counts.remote_faults))?;
    let summary = Summary::new(&load, [&read, &local], [&before, &after], hit_rate);
    let picture = picture::png(&summary)?;
    Ok(Outcome { summary, picture })
}

/// Writes all values, calls `written`, and reads the values back.
fn exercise<T>(
    stage: &Stage,
    load: &Load,
    interrupted: &AtomicBool,
    written: impl FnOnce() -> Result<T>,
) -> Result<(Read, T)> {
    let mut client = Client::connect(&stage.socket(), START)?;
    client.write(load, interrupted)?;
    let asked = written()?;
    Ok((client.read(load, interrupted)?, asked))
}

/// Reads values one by one, and returns the share of reads that fetched no page.
fn hit_rate(
    stage: &Stage,
    load: &Load,
    interrupted: &AtomicBool,
    fetched: impl Fn() -> Result<u64>,
) -> Result<f64> {
    let mut client = Client::connect(&stage.socket(), START)?;
    let mut before = fetched()?;
    let mut hits = 0;
    for _ in 0..SAMPLES {
        client.read_one(load, interrupted)?;
        let after = fetched()?;
        hits += u64::from(after == before);
        before = after;
    }
    Ok(hits as f64 / SAMPLES as f64)
}

impl Summary {
    fn new(
        load: &Load,
        [read, local]: [&Read; 2],
        [before, after]: [&RegionStatus; 2],
        hit_rate: f64,
    ) -> Self {
        let faults = after.counts.remote_faults - before.counts.remote_faults;
        let per_second = |read: &Read| read.values as f64 / read.took.as_secs_f64();
        Self {
            values_written: load.values,
            values_verified: read.right,
            values_wrong: load.values - read.right,
            values_missing: read.missing,
            memory: Memory {
                local_bytes: after.usage.cache,
                region_bytes: after.usage.size,
                remote_bytes: before.usage.remote,
            },
            faults,
            hit_rate,
            fault_p50_us: after.fetches.latency.p50_us,
            fault_p99_us: after.fetches.latency.p99_us,
            throughput: Throughput {
                reads_per_s: per_second(read),
                local_reads_per_s: per_second(local),
                throughput_ratio: per_second(read) / per_second(local),
            },
            histogram: after.fetches.histogram.clone(),
        }
    }
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (memory, throughput) = (&self.memory, &self.throughput);
        writeln!(
            f,
            "{} values written, {} verified byte by byte, {} wrong ({} missing)",
            self.values_written, self.values_verified, self.values_wrong, self.values_missing
        )?;
        writeln!(
            f,
            "memcached's memory: {}, of which {} at most in local RAM; {} were with the lender",
            memory.region_bytes, memory.local_bytes, memory.remote_bytes
        )?;
        writeln!(f, "reads without a fetch: {:.1} %", self.hit_rate * 100.0)?;
        let (p50, p99) = (self.fault_p50_us, self.fault_p99_us);
        writeln!(f, "fetches: {}, half within {p50:.0} us, 99 % within {p99:.0} us", self.faults)?;
        for bucket in &self.histogram {
            let most = self.histogram.iter().map(|bucket| bucket.faults).max().unwrap_or(1).max(1);
            let bar = "#".repeat((bucket.faults * 50 / most) as usize);
            writeln!(f, "  up to {:>8.0} us {:>8} {bar}", bucket.up_to_us, bucket.faults)?;
        }
        writeln!(
            f,
            "throughput: {:.0} reads a second, {:.2} of the {:.0} with all in local RAM",
            throughput.reads_per_s, throughput.throughput_ratio, throughput.local_reads_per_s
        )
    }
}

/// The demo's directory; its drop removes all regions and files in it.
#[derive(Debug)]
struct Stage {
    dir: PathBuf,
}

impl Stage {
    fn socket(&self) -> PathBuf {
        self.dir.join("memcached")
    }

    fn regions(&self) -> PathBuf {
        self.dir.join("regions")
    }

    fn region(&self, size: Bytes, cache: Bytes) -> Result<Served> {
        let what = || "making the region";
        let uri = format!("nbd+unix:///?socket={}", process::lender_socket(&self.dir).display());
        let uri = uri.parse().or_fail(what)?;
        let lender = ClaimedLender::find(&uri, &Trust::default(), None, Purpose::Volume("demo"))?;
        let name: RegionName = REGION.parse().or_fail(what)?;
        let leases = vec![lender.lease];
        let spec =
            RegionSpec { leases, identity: lender.identity, ..RegionSpec::new(name, size, cache) };
        let exe = program::aquifer()?;
        client::create(&exe, &self.regions(), &spec).or_fail(what)?;
        Ok(Served(Files::new(&self.regions(), &spec.name)))
    }

    /// Starts memcached with so much memory, in a region or in local RAM.
    fn memcached(&self, size: Bytes, region: Option<&Files>) -> Result<Process> {
        let _ = fs::remove_file(self.socket());
        let mut command = Command::new("memcached");
        command.args([
            "-u",
            "root",
            "-t",
            "2",
            "-m",
            &(size.0 / Bytes::mib(1).0).to_string(),
            "-s",
        ]);
        command.arg(self.socket()).stdout(Stdio::null()).stderr(Stdio::null());
        if let Some(region) = region {
            command.arg("-e").arg(region.region());
            with_preload(&mut command)?;
        }
        Process::start(&mut command, "memcached")
            .map_err(|failure| failure.help("apt-get install memcached"))
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        clear(&self.dir);
    }
}

/// A region; its drop removes it.
#[derive(Debug)]
struct Served(Files);

impl Drop for Served {
    fn drop(&mut self) {
        // memcached has just ended; its mapping of the region may last a moment longer.
        let deadline = Instant::now() + START;
        while matches!(client::remove(&self.0), Err(RegionError::InUse { .. }))
            && Instant::now() < deadline
        {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Removes the regions in a demo's directory, and the directory.
fn clear(dir: &Path) {
    for region in client::list(&dir.join("regions")).unwrap_or_default() {
        drop(Served(region));
    }
    remove(dir);
}
