//! The rules for a process on which the kernel's reclaim waits.
//!
//! Reclaim hands swapped-out pages to this process, so this process must not need a free page to
//! take them. [`protect`] applies the rules and reports each one, so that `status` and `doctor` can
//! show which protections hold. A rule that cannot be applied is not fatal: swap with less
//! protection is still better than none.

mod cgroup;
mod reserve;

pub(crate) use self::reserve::fill as fill_reserve;

use std::io;

use aquifer_procfs::{EXEMPT, set_oom_score};
use rustix::mm::MlockAllFlags;
use rustix::process::{Resource, Rlimit};
use rustix::thread::{CapabilitySet, capabilities};
use serde::{Deserialize, Serialize};

use crate::sys;

/// Bytes of heap kept in memory for work outside the page path: control requests, reconnects, TLS
/// handshakes.
const HEAP_RESERVE: usize = 4 << 20;

/// Bytes of stack that each thread touches before it serves.
const STACK_RESERVE: usize = 128 << 10;

/// A rule and whether it holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// Effect of the rule, as shown to users.
    pub rule: String,
    /// The reason why the rule could not be applied; `None` if it holds.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub failed: Option<String>,
}

/// All rules, in the order of their application.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SafetyReport(pub Vec<Rule>);

impl SafetyReport {
    /// Tells whether all rules hold.
    pub fn is_complete(&self) -> bool {
        self.0.iter().all(|rule| rule.failed.is_none())
    }

    fn apply(&mut self, rule: &str, result: io::Result<()>) {
        self.0.push(Rule {
            rule: rule.to_owned(),
            failed: result.err().map(|error| error.to_string()),
        });
    }
}

/// Applies the rules to the calling process.
///
/// The caller must do so while the process has a single thread. Threads started later inherit the
/// rules that apply per thread, and their stacks and buffers are locked when first touched.
pub fn protect() -> SafetyReport {
    let mut report = SafetyReport::default();
    report.apply("is exempt from the OOM killer", never_out_of_memory());
    report.apply("is not limited by a memory cgroup", cgroup::leave());
    report.apply("never waits for memory that it must free itself", io_flusher());
    report.apply("may use the kernel's memory reserve (real-time priority)", reserve::enter());
    report.apply("has a large enough reserve (vm.min_free_kbytes)", reserve::fill());
    report.apply("finds the reserve free (vm.watermark_boost_factor)", reserve::hold());
    report.apply("may open as many connections as the host allows", open_files());
    report.apply("never shrinks its heap", sys::keep_heap());
    report.apply("is never paged out", lock_memory());
    reserve_heap();
    touch_stack();
    report
}

/// Gives up the privileges of the swap path in a program that a protected process has started. Such
/// a program would use memory reserved for swapping, and could not free memory by swapping itself.
pub(crate) fn renounce() -> io::Result<()> {
    sys::ordinary_priority()?;
    Ok(rustix::process::configure_io_flusher_behavior(false)?)
}

/// Applies the rules that suit an agent. It serves other hosts' pages, which memory pressure here
/// must not lose; but this host's reclaim never waits for it.
///
/// The caller must do so before it maps memory that must not be filled, such as the pages of
/// leases.
pub fn protect_agent() -> SafetyReport {
    let mut report = SafetyReport::default();
    report.apply("is exempt from the OOM killer", never_out_of_memory());
    report.apply("is never paged out", lock_memory());
    report
}

fn never_out_of_memory() -> io::Result<()> {
    set_oom_score(EXEMPT).map_err(needs("CAP_SYS_RESOURCE"))
}

/// Sets `PR_SET_IO_FLUSHER`: allocations by this thread, and by threads that it starts, do not wait
/// for I/O. They would otherwise wait for this process.
fn io_flusher() -> io::Result<()> {
    rustix::process::configure_io_flusher_behavior(true)
        .map_err(|error| needs("CAP_SYS_RESOURCE")(error.into()))
}

/// Raises the soft limit to the hard limit, as each worker has a connection for each lease.
fn open_files() -> io::Result<()> {
    let now = rustix::process::getrlimit(Resource::Nofile);
    Ok(rustix::process::setrlimit(Resource::Nofile, Rlimit { current: now.maximum, ..now })?)
}

/// Locks all current mappings, program text included, and later mappings once they are touched.
///
/// It takes two calls, because the flag `ONFAULT` would otherwise apply to both. Text must be read
/// at once: a page of it that was never executed would otherwise be read from disk when memory is
/// shortest. Later mappings must not be filled as they are made. FUSE's receive buffers, for
/// example, take 16 MiB a worker, of which only a part is used. The worker touches that part before
/// the first request.
///
/// The limit on locked memory must not apply: later mappings would fail at the limit.
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

/// Adds to an error the privilege that the failed step needs.
fn needs(what: &'static str) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{error}; this needs {what}"))
}

/// Grows the heap and touches it. The allocator never trims it, so it serves later allocations.
fn reserve_heap() {
    let mut reserve = vec![0u8; HEAP_RESERVE];
    reserve.fill(1);
    std::hint::black_box(&reserve);
}

/// Touches the part of the calling thread's stack that it will need.
pub(crate) fn touch_stack() {
    let mut reserve = [0u8; STACK_RESERVE];
    reserve.fill(1);
    std::hint::black_box(&reserve);
}
