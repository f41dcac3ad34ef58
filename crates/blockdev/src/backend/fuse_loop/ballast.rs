//! Reserve memory, freed when the kernel has none left to pass a request to FUSE.
//!
//! The loop driver's thread needs a little memory for each request. Reclaim and this process may
//! use the reserve below the `min` watermark; that thread may not. If they have used it and all
//! reclaimable pages are dirty pages of the loop device, the host deadlocks. The pages wait for
//! write-back, and the thread that would issue the writes waits for memory. A few free pages
//! resolve the deadlock, so this module keeps some locked for it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::{self, Thread};
use std::time::Duration;

use crate::sys::LockedMemory;

/// Count of chunks, 8 MiB together. In a deadlock, free memory was two MiB below the watermark, and
/// each processor keeps some freed pages for itself.
const CHUNKS: usize = 16;
const CHUNK: usize = 512 << 10;

/// Interval between two looks at the requests. Two looks in a row must find no progress.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// Counters of requests that FUSE has delivered to the workers.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    begun: AtomicU64,
    done: AtomicU64,
}

/// Thread that watches the requests of one loop device. Dropping this value ends it.
#[derive(Debug)]
pub(super) struct Watch {
    thread: Thread,
    ended: Arc<AtomicBool>,
}

impl Arrivals {
    /// Counts a request as arrived. The caller drops the guard once it has replied.
    pub(super) fn arrive(&self) -> impl Drop {
        struct Guard<'a>(&'a AtomicU64);
        impl Drop for Guard<'_> {
            fn drop(&mut self) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.begun.fetch_add(1, Ordering::Relaxed);
        Guard(&self.done)
    }

    /// Returns the number of requests so far if every one has been answered, else `None`.
    fn all_answered(&self) -> Option<u64> {
        let done = self.done.load(Ordering::Relaxed);
        (self.begun.load(Ordering::Relaxed) == done).then_some(done)
    }
}

impl Watch {
    /// Starts to watch over `device`. Allocates and locks the reserve first.
    pub(super) fn start(device: &Path, arrivals: Arc<Arrivals>) -> io::Result<Self> {
        let name = device.file_name().unwrap_or_default();
        let in_flight = File::open(Path::new("/sys/block").join(name).join("inflight"))?;
        let mut ballast = Ballast::new(File::open("/proc/meminfo")?)?;
        let ended = Arc::new(AtomicBool::new(false));
        let end = ended.clone();
        // A thread allocates as it starts. Waiting here keeps that out of the request path.
        let running = Arc::new(Barrier::new(2));
        let runs = running.clone();
        let body = move || {
            runs.wait();
            let mut before = None;
            while !end.load(Ordering::Relaxed) {
                thread::park_timeout(CHECK_INTERVAL);
                let now = arrivals.all_answered().filter(|_| waits(&in_flight));
                if now.is_some() && now == before {
                    ballast.give_up();
                } else if now.is_none() {
                    ballast.take_back();
                }
                before = now;
            }
        };
        let thread = thread::Builder::new().name("ballast".to_owned()).spawn(body)?;
        running.wait();
        Ok(Self { thread: thread.thread().clone(), ended })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        self.thread.unpark();
    }
}

/// Tells whether the block device has requests in flight. `/sys/block/DEVICE/inflight` holds two
/// counts: reads and writes.
fn waits(in_flight: &File) -> bool {
    numbers(in_flight).any(|number| number > 0)
}

/// Reads the numbers in the first 128 bytes of a file, without allocating.
fn numbers(file: &File) -> impl Iterator<Item = u64> + use<> {
    let mut text = [0; 128];
    let length = file.read_at(&mut text, 0).unwrap_or(0);
    let mut at = 0;
    std::iter::from_fn(move || {
        let digit = |at: usize| text[..length].get(at).filter(|byte| byte.is_ascii_digit());
        while at < length && digit(at).is_none() {
            at += 1;
        }
        let mut number = None;
        while let Some(byte) = digit(at) {
            number = Some(number.unwrap_or(0) * 10 + u64::from(byte - b'0'));
            at += 1;
        }
        number
    })
}

struct Ballast {
    chunks: Vec<LockedMemory>,
    /// `/proc/meminfo`; its second number is `MemFree`, in KiB.
    memory: File,
    /// Bytes that must stay free when a chunk is taken back: 5/4 of `min_free_kbytes`, about the
    /// `low` watermark below which kswapd starts.
    least_free: u64,
}

impl Ballast {
    fn new(memory: File) -> io::Result<Self> {
        let min_free = aquifer_procfs::number("/proc/sys/vm/min_free_kbytes")? << 10;
        let mut chunks = Vec::with_capacity(CHUNKS);
        for _ in 0..CHUNKS {
            chunks.push(LockedMemory::new(CHUNK)?);
        }
        Ok(Self { chunks, memory, least_free: min_free / 4 * 5 })
    }

    /// Frees all chunks.
    fn give_up(&mut self) {
        self.chunks.clear();
    }

    /// Locks one chunk again, if enough memory stays free for the kernel.
    fn take_back(&mut self) {
        let free = || numbers(&self.memory).nth(1).unwrap_or(0) << 10;
        if self.chunks.len() == CHUNKS || free() < self.least_free + CHUNK as u64 {
            return;
        }
        // A failed allocation is retried at the next look.
        self.chunks.extend(LockedMemory::new(CHUNK));
        if self.chunks.len() == CHUNKS {
            tracing::warn!(
                "memory ran so low that the kernel could not swap; Aquifer's reserve resolved it"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn file(text: &str) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn requests_in_flight_are_seen() {
        assert!(!waits(&file("       0        0\n")));
        assert!(waits(&file("       0        3\n")));
        assert!(waits(&file("       2        0\n")));
    }

    #[test]
    fn the_kernels_free_memory_is_read() {
        let memory = file(
            "MemTotal:       24684168 kB\nMemFree:        20263112 kB\nMemAvailable:   2 kB\n",
        );
        assert_eq!(numbers(&memory).nth(1), Some(20_263_112));
        let real = numbers(&File::open("/proc/meminfo").unwrap()).nth(1).unwrap();
        assert!(real > 0);
    }

    #[test]
    fn a_request_that_is_being_served_is_no_sign() {
        let arrivals = Arrivals::default();
        assert_eq!(arrivals.all_answered(), Some(0));
        let request = arrivals.arrive();
        assert_eq!(arrivals.all_answered(), None);
        drop(request);
        assert_eq!(arrivals.all_answered(), Some(1));
    }

    #[test]
    fn released_memory_is_taken_back_bit_by_bit() {
        let mut ballast =
            Ballast::new(file("MemTotal: 9999999999 kB\nMemFree: 9999999999 kB\n")).unwrap();
        assert_eq!(ballast.chunks.len(), CHUNKS);
        ballast.give_up();
        assert!(ballast.chunks.is_empty());
        (0..CHUNKS + 1).for_each(|_| ballast.take_back());
        assert_eq!(ballast.chunks.len(), CHUNKS);
        ballast.give_up();
        ballast.memory = file("MemTotal: 9999999999 kB\nMemFree: 1 kB\n");
        ballast.take_back();
        assert!(ballast.chunks.is_empty(), "it leaves to others what they need");
    }
}
