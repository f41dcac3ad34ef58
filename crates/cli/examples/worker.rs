//! The work of guests in measurements, at most RATE pages a second; a page missed in a second is
//! not made up for.
//!
//! `worker memory MIB RATE SEED` checks and rewrites random pages of its own memory. No page equals
//! a page of another seed. `worker reads FILE MIB RATE SEED` reads random pages of a file or device
//! through the guest's page cache. Four of five accesses go to a third of the pages. Each second
//! the program prints `worker SECOND PAGES WRONG`.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::thread;
use std::time::{Duration, Instant};

const PAGE_SIZE: usize = 4096;
const WORDS_PER_PAGE: usize = PAGE_SIZE / 8;

/// The loop reads the clock once a round.
const ROUNDS_PER_SECOND: u32 = 20;

trait Pages {
    /// Works on a page; returns whether its content was correct.
    fn work(&mut self, page: usize) -> io::Result<bool>;
}

struct WorkerMemory {
    words: Vec<u64>,
    generations: Vec<u32>,
    seed: u64,
}

impl WorkerMemory {
    fn new(pages: usize, seed: u64) -> Self {
        let words = vec![0; pages * WORDS_PER_PAGE];
        let mut memory = Self { words, generations: vec![0; pages], seed };
        (0..pages).for_each(|page| memory.write(page));
        memory
    }

    fn first(&self, page: usize) -> u64 {
        let number = (self.seed << 56) ^ ((page as u64) << 32) ^ u64::from(self.generations[page]);
        number.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    fn write(&mut self, page: usize) {
        let first = self.first(page);
        let words = &mut self.words[page * WORDS_PER_PAGE..][..WORDS_PER_PAGE];
        words.iter_mut().zip(0..).for_each(|(word, at)| *word = first.wrapping_add(at));
    }
}

impl Pages for WorkerMemory {
    fn work(&mut self, page: usize) -> io::Result<bool> {
        let first = self.first(page);
        let good = self.words[page * WORDS_PER_PAGE..][..WORDS_PER_PAGE]
            .iter()
            .zip(0..)
            .all(|(word, at)| *word == first.wrapping_add(at));
        self.generations[page] += 1;
        self.write(page);
        Ok(good)
    }
}

impl Pages for File {
    fn work(&mut self, page: usize) -> io::Result<bool> {
        let mut bytes = [0; PAGE_SIZE];
        self.read_exact_at(&mut bytes, (page * PAGE_SIZE) as u64)?;
        Ok(true)
    }
}

fn run(mut on: impl Pages, pages: usize, rate: u32, seed: u64) -> io::Result<()> {
    let mut random = 88_172_645_463_325_252 ^ seed;
    let (mut done, mut wrong) = (0_u64, 0_u64);
    let round = Duration::from_secs(1) / ROUNDS_PER_SECOND;
    for second in 1_u64.. {
        for _ in 0..ROUNDS_PER_SECOND {
            let until = Instant::now() + round;
            for _ in 0..(rate / ROUNDS_PER_SECOND).max(1) {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let among = if random.is_multiple_of(5) { pages } else { pages.div_ceil(3) };
                wrong += u64::from(!on.work((random >> 8) as usize % among)?);
                done += 1;
                if Instant::now() > until {
                    break;
                }
            }
            thread::sleep(until.saturating_duration_since(Instant::now()));
        }
        let mut out = io::stdout().lock();
        writeln!(out, "worker {second} {done} {wrong}")?;
        out.flush()?;
    }
    Ok(())
}

fn main() -> io::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |word: &String| word.parse::<u64>().map_err(io::Error::other);
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["memory", ..] if words.len() == 4 => {
            let [pages, rate, seed] =
                [number(&words[1])? * 256, number(&words[2])?, number(&words[3])?];
            run(WorkerMemory::new(pages as usize, seed), pages as usize, rate as u32, seed)
        }
        ["reads", file, ..] if words.len() == 5 => {
            let [pages, rate, seed] =
                [number(&words[2])? * 256, number(&words[3])?, number(&words[4])?];
            run(File::open(file)?, pages as usize, rate as u32, seed)
        }
        _ => Err(io::Error::other(
            "usage: worker memory MIB RATE SEED | worker reads FILE MIB RATE SEED",
        )),
    }
}
