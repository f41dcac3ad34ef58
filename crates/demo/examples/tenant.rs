//! The load of a tenant's guest: `tenant SEED` keeps memory, checks and rewrites it, and reports.
//!
//! Each line of standard input is an order. `MIB RATE` sets the memory to keep, and the most pages
//! to visit a second; a page missed in a second is not made up for. A visit compares each word of a
//! page with the last write, and writes the next version. Four of five visits go to a third of the
//! pages. Memory that an order takes away is checked before the program frees it. `check` ends the
//! visits, checks all memory, and prints `checked` after a report.
//!
//! Each second the program prints `tenant BEGAN ASKED RATE MIB VISITS WRITTEN VERIFIED WRONG`.
//! BEGAN is the time of its start in nanoseconds, by which a guest that started again is told from
//! one that went on. ASKED and RATE repeat the last order, and MIB is the memory that it keeps. The
//! rest are counts of pages since its start.

use std::io::{self, Write as _};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

const WORDS: usize = 4096 / 8;
const PAGES_PER_MIB: usize = 256;
/// Pages of a chunk, the unit in which the program allocates and frees.
const CHUNK: usize = 16 * PAGES_PER_MIB;

/// The file that makes the guest's kernel move its pages together.
const COMPACT: &str = "/proc/sys/vm/compact_memory";

const ROUNDS_PER_SECOND: usize = 20;
/// The most pages to add in a round: 8 MiB a second.
const FILL: usize = 8 * PAGES_PER_MIB / ROUNDS_PER_SECOND;

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    visits: u64,
    written: u64,
    verified: u64,
    wrong: u64,
}

#[derive(Debug)]
struct Kept {
    seed: u64,
    chunks: Vec<Vec<u64>>,
    /// The version of each page's content.
    versions: Vec<u64>,
    counts: Counts,
}

impl Kept {
    fn first(&self, page: usize) -> u64 {
        let mix = |word: u64| {
            let word = (word ^ (word >> 29)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            word ^ (word >> 32)
        };
        mix(mix(mix(self.seed) ^ page as u64) ^ self.versions[page])
    }

    fn words(&mut self, page: usize) -> &mut [u64] {
        &mut self.chunks[page / CHUNK][page % CHUNK * WORDS..][..WORDS]
    }

    fn write(&mut self, page: usize) {
        self.versions[page] += 1;
        let first = self.first(page);
        self.words(page).iter_mut().zip(0..).for_each(|(word, at)| *word = first.wrapping_add(at));
        self.counts.written += 1;
    }

    fn check(&mut self, page: usize) {
        let first = self.first(page);
        // Compares without a branch in the loop, as emulated guests are slow.
        let words = self.words(page).iter().zip(0..);
        let differs = words.fold(0, |all, (word, at)| all | (word ^ first.wrapping_add(at)));
        match differs {
            0 => self.counts.verified += 1,
            _ => self.counts.wrong += 1,
        }
    }

    /// Adds a page; the chunk of a first page takes no memory before its pages are written.
    fn add(&mut self) {
        let page = self.versions.len();
        if page.is_multiple_of(CHUNK) {
            self.chunks.push(vec![0; CHUNK * WORDS]);
        }
        self.versions.push(0);
        self.write(page);
    }

    /// Checks and frees all chunks beyond `pages`.
    fn shrink(&mut self, pages: usize) {
        let chunks = pages.div_ceil(CHUNK);
        (chunks * CHUNK..self.versions.len()).for_each(|page| self.check(page));
        self.versions.truncate(chunks * CHUNK);
        self.chunks.truncate(chunks);
        self.versions.shrink_to_fit();
    }

    fn report(&self, began: u128, asked: usize, rate: usize) -> io::Result<()> {
        let Counts { visits, written, verified, wrong } = self.counts;
        let (asked, mib) = (asked / PAGES_PER_MIB, self.versions.len() / PAGES_PER_MIB);
        let counts = format!("{visits} {written} {verified} {wrong}");
        let mut out = io::stdout().lock();
        writeln!(out, "tenant {began} {asked} {rate} {mib} {counts}")?;
        out.flush()
    }
}

/// Returns the orders of standard input, which a thread reads.
fn orders() -> Receiver<String> {
    let (sender, orders) = channel();
    thread::spawn(move || {
        for line in io::stdin().lines() {
            if line.map(|line| sender.send(line)).is_err() {
                return;
            }
        }
    });
    orders
}

fn main() -> io::Result<()> {
    let seed = std::env::args().nth(1).and_then(|word| word.parse().ok());
    let seed = seed.ok_or_else(|| io::Error::other("usage: tenant SEED"))?;
    let began = SystemTime::UNIX_EPOCH.elapsed().map_err(io::Error::other)?.as_nanos();
    let (chunks, versions, counts) = Default::default();
    let mut kept = Kept { seed, chunks, versions, counts };
    let (orders, mut pages, mut rate) = (orders(), 0, 0);
    let (mut random, mut reported) = (88_172_645_463_325_252 ^ (seed << 20), Instant::now());
    loop {
        let until = Instant::now() + Duration::from_secs(1) / ROUNDS_PER_SECOND as u32;
        while let Ok(order) = orders.try_recv() {
            let numbers: Vec<usize> =
                order.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            if let [mib, most] = numbers[..] {
                (pages, rate) = (mib * PAGES_PER_MIB, most);
                if kept.versions.len() > pages {
                    kept.shrink(pages);
                    // The kernel reports free memory to the host in blocks of 2 MiB.
                    std::fs::write(COMPACT, "1")?;
                }
            } else if order.trim() == "check" {
                (pages, rate) = (kept.versions.len(), 0);
                (0..pages).for_each(|page| kept.check(page));
                kept.report(began, pages, rate)?;
                writeln!(io::stdout().lock(), "checked")?;
            }
        }
        for _ in 0..FILL.min(pages.saturating_sub(kept.versions.len())) {
            kept.add();
        }
        let held = kept.versions.len();
        for _ in 0..if held == 0 { 0 } else { rate / ROUNDS_PER_SECOND } {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let among = if random.is_multiple_of(5) { held } else { held.div_ceil(3) };
            let page = (random >> 8) as usize % among;
            kept.check(page);
            kept.write(page);
            kept.counts.visits += 1;
            if Instant::now() > until {
                break;
            }
        }
        thread::sleep(until.saturating_duration_since(Instant::now()));
        if reported.elapsed() >= Duration::from_secs(1) {
            reported = Instant::now();
            kept.report(began, pages, rate)?;
        }
    }
}
