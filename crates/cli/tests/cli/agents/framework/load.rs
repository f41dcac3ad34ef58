//! Programs that need memory: `aquifer load`, which checks that every page follows from a seed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aquifer_cli::cgroup::Cgroup;
use aquifer_cli::load::{Event, Verdict};
use aquifer_hosts::Daemon;
use aquifer_page::Bytes;

/// How long a load may take to fill or to verify its memory while it swaps.
const LOAD_TIMEOUT: Duration = Duration::from_secs(180);

/// Returns a copy of `aquifer` for loads, so that loads and lenders' agents share no page cache.
///
/// A load that reads parts of the file holds those pages locked while the kernel reclaims memory in
/// the load's cgroup. The reclaim waits for swap, and so for the lender. A lender that starts just
/// then may need the same pages, and both would wait for ever.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let load = Path::new(env!("CARGO_TARGET_TMPDIR")).join("load");
        let new = load.with_extension(std::process::id().to_string());
        fs::copy(env!("CARGO_BIN_EXE_aquifer"), &new).unwrap();
        fs::rename(&new, &load).unwrap();
        load
    })
}

/// A running load; its drop kills it.
pub struct Load {
    process: Daemon<Event>,
    bytes: Bytes,
}

impl Load {
    pub(super) fn start(cgroup: &Cgroup, bytes: Bytes, rate: Option<Bytes>) -> Self {
        static SEED: AtomicU64 = AtomicU64::new(1);
        // The shell enters the cgroup and becomes the load, so all its pages are charged there.
        let mut command = Command::new("sh");
        command
            .args(["-c", r#"echo 0 > "$0" && exec "$@""#])
            .arg(cgroup.path().join("cgroup.procs"));
        command.arg(program()).args(["load", "--hold", "--bytes", &bytes.0.to_string()]);
        command.arg("--seed").arg(SEED.fetch_add(1, Ordering::Relaxed).to_string());
        if let Some(rate) = rate {
            command.arg("--rate").arg(rate.0.to_string());
        }
        let process = Daemon::start(command.stdin(Stdio::piped())).unwrap();
        Self { process, bytes }
    }

    /// Waits until all its memory is filled.
    #[track_caller]
    pub fn filled(&mut self) {
        self.wait("filled its memory", |event| matches!(event, Event::Filled { .. }).then_some(()));
    }

    /// Lets the load check every byte.
    ///
    /// # Panics
    /// If a page differs from the last write.
    #[track_caller]
    pub fn verify(&mut self) {
        self.order("verify");
        let verdict = self.wait("verified its memory", |event| match event {
            Event::Verified(verdict) => Some(verdict),
            _ => None,
        });
        let Verdict { pages_verified, pages_lost, .. } = verdict;
        assert_eq!((pages_verified, pages_lost), (self.bytes.pages(), 0), "{verdict:?}");
    }

    /// Lets the load rewrite all its memory, again and again, during `work`; then verifies every
    /// byte.
    #[track_caller]
    pub fn rewrite_during(&mut self, work: impl FnOnce() + Send) {
        std::thread::scope(|scope| {
            let work = scope.spawn(work);
            while !work.is_finished() {
                self.order("rewrite");
                self.filled();
            }
        });
        self.verify();
    }

    /// Lets the load free its memory.
    #[track_caller]
    pub fn free(&mut self) {
        self.order("free");
        self.wait("given its memory back", |event| matches!(event, Event::Freed).then_some(()));
    }

    /// Sends a command, and does not wait for its result.
    #[track_caller]
    pub fn order(&mut self, order: &str) {
        self.process.order(order).unwrap();
    }

    /// Sends a command, unless the load has died of its lost pages already.
    pub fn order_if_alive(&mut self, order: &str) {
        _ = self.process.order(order);
    }

    /// Waits until the load is killed.
    #[track_caller]
    pub fn killed(mut self) -> ExitStatus {
        self.process.ended_within(LOAD_TIMEOUT).expect("the killed load has ended")
    }

    #[track_caller]
    fn wait<T>(&mut self, what: &str, wanted: impl Fn(Event) -> Option<T>) -> T {
        let found = self.process.wait(Instant::now() + LOAD_TIMEOUT, wanted).unwrap();
        found.unwrap_or_else(|| panic!("the load has not {what} within {LOAD_TIMEOUT:?}"))
    }
}
