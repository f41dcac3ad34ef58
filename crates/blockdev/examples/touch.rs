//! A load for swap: fills memory with known content, then checks and rewrites pages at random.
//!
//! `touch SIZE COUNT [SEED]` prints one JSON line once memory is filled and one after `COUNT`
//! random accesses. Then it reads commands from standard input. `verify` checks all pages and
//! prints a JSON line; `access` makes `COUNT` more random accesses. Any other line, or the end of
//! the input, ends the program. The exit status is 1 if any page had wrong content, and 2 if the
//! arguments are wrong.

use std::io::{self, BufRead, Write};
use std::process::ExitCode;
use std::time::Instant;

use aquifer_page::{Bytes, PAGE_SIZE};

const WORDS: usize = PAGE_SIZE / 8;

/// Pages with content that follows from their index and the number of rewrites.
struct Load {
    words: Vec<u64>,
    generations: Vec<u8>,
    wrong: u64,
}

impl Load {
    fn fill(size: Bytes) -> Self {
        let pages = size.0 as usize / PAGE_SIZE;
        let mut load =
            Self { words: vec![0; pages * WORDS], generations: vec![0; pages], wrong: 0 };
        (0..pages).for_each(|page| load.write(page));
        load
    }

    fn page(&mut self, page: usize) -> &mut [u64] {
        &mut self.words[page * WORDS..(page + 1) * WORDS]
    }

    fn expected(&self, page: usize) -> u64 {
        mix((page as u64) << 8 | u64::from(self.generations[page]))
    }

    fn write(&mut self, page: usize) {
        let first = self.expected(page);
        self.page(page)
            .iter_mut()
            .zip(0..)
            .for_each(|(word, index)| *word = first.wrapping_add(index));
    }

    fn check(&mut self, page: usize) {
        let first = self.expected(page);
        let good =
            self.page(page).iter().zip(0..).all(|(word, index)| *word == first.wrapping_add(index));
        self.wrong += u64::from(!good);
    }

    /// Checks a page and gives it new content. Returns the time that this took, in nanoseconds.
    fn access(&mut self, page: usize) -> u32 {
        let start = Instant::now();
        self.check(page);
        self.generations[page] = self.generations[page].wrapping_add(1);
        self.write(page);
        u32::try_from(start.elapsed().as_nanos()).unwrap_or(u32::MAX)
    }

    /// Accesses `count` random pages, and writes the latencies to `out` as one JSON line.
    fn accesses(&mut self, count: usize, seed: u64, mut out: impl Write) -> io::Result<()> {
        let pages = self.generations.len();
        let mut times = Vec::with_capacity(count);
        let start = Instant::now();
        for step in 0..count {
            let page = mix(seed << 40 | step as u64) as usize % pages;
            times.push(self.access(page));
        }
        let seconds = start.elapsed().as_secs_f64();
        times.sort_unstable();
        let percentile =
            |share: usize| f64::from(times.get(count * share / 100).copied().unwrap_or(0)) / 1e3;
        writeln!(
            out,
            concat!(
                r#"{{"accesses":{},"seconds":{:.3},"us_per_access":{:.2},"#,
                r#""p50_us":{:.2},"p99_us":{:.2},"wrong":{}}}"#
            ),
            count,
            seconds,
            seconds * 1e6 / count.max(1) as f64,
            percentile(50),
            percentile(99),
            self.wrong,
        )
    }
}

/// Hashes a number (the finaliser of splitmix64).
fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let parsed = || -> Option<(Bytes, usize, u64)> {
        let seed = arguments.get(2).map_or(Some(1), |seed| seed.parse().ok())?;
        Some((arguments.first()?.parse().ok()?, arguments.get(1)?.parse().ok()?, seed))
    };
    let Some((size, count, seed)) = parsed() else {
        eprintln!("usage: touch SIZE COUNT [SEED]");
        return ExitCode::from(2);
    };
    match run(size, count, seed) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(wrong) => {
            eprintln!("touch: {wrong} pages were wrong");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("touch: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the whole load on standard input and output. Returns the number of failed page checks.
pub fn run(size: Bytes, count: usize, mut seed: u64) -> io::Result<u64> {
    let mut out = io::stdout();
    let start = Instant::now();
    let mut load = Load::fill(size);
    let pages = load.generations.len();
    writeln!(out, r#"{{"filled_pages":{pages},"seconds":{:.3}}}"#, start.elapsed().as_secs_f64())?;

    load.accesses(count, seed, &mut out)?;
    for line in io::stdin().lock().lines() {
        match line?.as_str() {
            "verify" => {
                // Starts at the end, which was filled last. In the other order, reclaim would swap
                // out each page just before its check.
                (0..pages).rev().for_each(|page| load.check(page));
                writeln!(out, r#"{{"verified_pages":{pages},"wrong":{}}}"#, load.wrong)?;
            }
            "access" => {
                seed += 1;
                load.accesses(count, seed, &mut out)?;
            }
            _ => break,
        }
    }
    Ok(load.wrong)
}
