//! The rules for a process that the kernel's reclaim waits for.
//!
//! A page that is swapped out is given to this process, so whatever this process needs in order to take it must
//! not need a page. [`protect`] applies the rules and reports each one, so that `status` and `doctor` can say
//! what protects a volume and what does not. A rule that cannot be applied is reported, never fatal: swap that is
//! a little less safe is still better than none.

mod cgroup;
mod reserve;

pub(crate) use self::reserve::fill as fill_reserve;

use std::io;

use rustix::mm::MlockAllFlags;
use rustix::process::{Resource, Rlimit};
use rustix::thread::{CapabilitySet, capabilities};
use serde::{Deserialize, Serialize};

use crate::sys;

/// Heap kept in memory for what happens outside the page path: control requests, reconnecting, TLS handshakes.
const HEAP_RESERVE: usize = 4 << 20;

/// Stack that each thread has in memory before it serves.
const STACK_RESERVE: usize = 128 << 10;

/// One rule and whether it holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// What it does, for people.
    pub rule: String,
    /// Why it could not be applied; absent where it holds.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub failed: Option<String>,
}

/// All rules in the order in which they were applied.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report(pub Vec<Rule>);

impl Report {
    /// Whether all rules hold.
    pub fn is_complete(&self) -> bool {
        self.0.iter().all(|rule| rule.failed.is_none())
    }

    fn apply(&mut self, rule: &str, result: io::Result<()>) {
        self.0.push(Rule { rule: rule.to_owned(), failed: result.err().map(|error| error.to_string()) });
    }
}

/// Applies the rules to the calling process.
///
/// To be called while the process has one thread: the threads started later inherit what holds for a thread, and
/// their stacks and buffers fall under the lock when they are first touched.
pub fn protect() -> Report {
    let mut report = Report::default();
    report.apply("is never chosen by the kernel when memory runs out", never_out_of_memory());
    report.apply("is not limited by a memory control group", cgroup::leave());
    report.apply("never waits for memory that it must free itself", io_flusher());
    report.apply("may have memory that the kernel keeps from others (real-time priority)", reserve::enter());
    report.apply("has enough of that memory on this host (vm.min_free_kbytes)", reserve::fill());
    report.apply("finds that memory free (vm.watermark_boost_factor)", reserve::hold());
    report.apply("may open as many connections as the host allows", open_files());
    report.apply("keeps the heap that it has", sys::keep_heap());
    report.apply("is never paged out", lock_memory());
    reserve_heap();
    touch_stack();
    report
}

/// Gives up, in a program that a protected process has started, what only the swap path may have: it would else take
/// the memory that is kept for that, and could not free any for itself by swapping.
pub(crate) fn renounce() -> io::Result<()> {
    sys::ordinary_priority()?;
    Ok(rustix::process::configure_io_flusher_behavior(false)?)
}

/// Applies those of the rules that suit an agent: it serves other hosts' pages, which must not be lost to a shortage here, but
/// this host's reclaim never waits for it.
///
/// To be called before the process maps anything that must not be filled, such as the pages of leases.
pub fn protect_agent() -> Report {
    let mut report = Report::default();
    report.apply("is never chosen by the kernel when memory runs out", never_out_of_memory());
    report.apply("is never paged out", lock_memory());
    report
}

fn never_out_of_memory() -> io::Result<()> {
    std::fs::write("/proc/self/oom_score_adj", "-1000").map_err(needs("CAP_SYS_RESOURCE"))
}

/// Allocations by this thread and those it starts do not wait for I/O, hence not for themselves.
fn io_flusher() -> io::Result<()> {
    rustix::process::configure_io_flusher_behavior(true)
        .map_err(|error| needs("CAP_SYS_RESOURCE")(error.into()))
}

/// Raises the soft limit to the hard one: there is a connection for each worker and lease.
fn open_files() -> io::Result<()> {
    let now = rustix::process::getrlimit(Resource::Nofile);
    Ok(rustix::process::setrlimit(Resource::Nofile, Rlimit { current: now.maximum, ..now })?)
}

/// Locks what is mapped now, program text included, and what will be mapped once it is touched.
///
/// Two calls, because one with both flags would take the same way for both. Text must come in now: a page of it
/// that was never executed would otherwise be read from disk when memory is shortest. Later mappings must not be
/// filled as they are made: FUSE's receive buffers are 16 MiB a worker, of which a part is ever used, and that part is
/// touched before the first request.
///
/// The limit on locked memory must not bind: under it, mappings made later would fail.
fn lock_memory() -> io::Result<()> {
    let unlimited = Rlimit { current: None, maximum: None };
    let may_exceed = capabilities(None)?.effective.contains(CapabilitySet::IPC_LOCK);
    if !may_exceed && rustix::process::setrlimit(Resource::Memlock, unlimited).is_err() {
        return Err(needs("CAP_IPC_LOCK, or no limit on locked memory")(
            io::ErrorKind::PermissionDenied.into(),
        ));
    }
    rustix::mm::mlockall(MlockAllFlags::CURRENT)?;
    Ok(rustix::mm::mlockall(MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT)?)
}

/// Says what a refused step needs.
fn needs(what: &'static str) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{error}; this needs {what}"))
}

/// Grows the heap and touches it; as it is never trimmed, it stays for the allocations to come.
fn reserve_heap() {
    let mut reserve = vec![0u8; HEAP_RESERVE];
    reserve.fill(1);
    std::hint::black_box(&reserve);
}

/// Brings the part of the calling thread's stack that it will need into memory.
pub(crate) fn touch_stack() {
    let mut reserve = [0u8; STACK_RESERVE];
    reserve.fill(1);
    std::hint::black_box(&reserve);
}
