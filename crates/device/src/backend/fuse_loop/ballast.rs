//! Memory that is given up when the kernel has none left to hand over a request with.
//!
//! The loop driver's thread needs a little memory for each request, and gets it as any thread does: not from the reserve below
//! the `min` watermark, of which reclaim itself and this process may take. Where they have, and all that could be freed must first be
//! written to the loop device, nothing moves any more: pages wait to be written, and the thread that would hand them over waits for
//! memory. A few pages end that, so some are kept for the purpose.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::{self, Thread};
use std::time::Duration;

use crate::sys::LockedMemory;

/// Enough to get the free memory above the watermark again, wherever it is freed to: two megabytes were missing, and each processor
/// keeps some for itself.
const CHUNKS: usize = 16;
const CHUNK: usize = 512 << 10;

/// How often it is looked whether requests move. Two looks in a row must find that they do not.
const LOOK: Duration = Duration::from_millis(250);

/// Requests that have come out of FUSE.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    begun: AtomicU64,
    done: AtomicU64,
}

/// Watches over the requests of one loop device until it is dropped.
#[derive(Debug)]
pub(super) struct Watch {
    thread: Thread,
    ended: Arc<AtomicBool>,
}

impl Arrivals {
    /// To be called when one comes, and the guard dropped when it is answered.
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

    /// How many have come, if all of them are answered.
    fn all_answered(&self) -> Option<u64> {
        let done = self.done.load(Ordering::Relaxed);
        (self.begun.load(Ordering::Relaxed) == done).then_some(done)
    }
}

impl Watch {
    /// Starts watching over `device`, with memory in hand.
    pub(super) fn start(device: &Path, arrivals: Arc<Arrivals>) -> io::Result<Self> {
        let name = device.file_name().unwrap_or_default();
        let in_flight = File::open(Path::new("/sys/block").join(name).join("inflight"))?;
        let mut ballast = Ballast::new(File::open("/proc/meminfo")?)?;
        let ended = Arc::new(AtomicBool::new(false));
        let end = ended.clone();
        // A thread allocates as it starts, which is not to be when requests come.
        let running = Arc::new(Barrier::new(2));
        let runs = running.clone();
        let body = move || {
            runs.wait();
            let mut before = None;
            while !end.load(Ordering::Relaxed) {
                thread::park_timeout(LOOK);
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

/// Whether the block device has requests that are not answered: `/sys/block/DEVICE/inflight` has those for reading and those for
/// writing.
fn waits(in_flight: &File) -> bool {
    numbers(in_flight).any(|number| number > 0)
}

/// The numbers at the beginning of a small file, read without allocating.
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
    /// `/proc/meminfo`, whose second line is what is free.
    memory: File,
    /// Bytes that must stay free when some is taken back: what the kernel itself frees up to.
    least_free: u64,
}

impl Ballast {
    fn new(memory: File) -> io::Result<Self> {
        let min_free = fs::read_to_string("/proc/sys/vm/min_free_kbytes")?;
        let min_free = min_free.trim().parse::<u64>().map_err(io::Error::other)? << 10;
        let mut chunks = Vec::with_capacity(CHUNKS);
        for _ in 0..CHUNKS {
            chunks.push(LockedMemory::new(CHUNK)?);
        }
        Ok(Self { chunks, memory, least_free: min_free / 4 * 5 })
    }

    /// Gives all of it to whoever needs it.
    fn give_up(&mut self) {
        self.chunks.clear();
    }

    /// Takes some of it back, where that leaves enough to others.
    fn take_back(&mut self) {
        let free = || numbers(&self.memory).nth(1).unwrap_or(0) << 10;
        if self.chunks.len() == CHUNKS || free() < self.least_free + CHUNK as u64 {
            return;
        }
        // Without it, it is tried again.
        self.chunks.extend(LockedMemory::new(CHUNK));
        if self.chunks.len() == CHUNKS {
            tracing::warn!(
                "memory was so short that the kernel could not swap; what is kept for that helped"
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
    fn what_is_in_flight_is_seen() {
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
    fn what_was_given_up_is_taken_back_bit_by_bit() {
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
