//! What a guest is kept busy with while it moves: memory that is checked and rewritten all the time.
//!
//! `churn MIB HOT RATE`: fills so many MiB, then checks and rewrites pages at random, nine of ten times among the first `HOT` percent of them, `RATE`
//! MiB a second at most. Ten times a second it says `churn TICK PAGES WRONG`: how often it has said so, pages rewritten so far, and pages so far that
//! were not what they must be; every tenth time after it has checked some of all pages in their order.

use std::io::{self, Write as _};
use std::thread;
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;

struct Memory {
    words: Vec<u64>,
    generations: Vec<u32>,
    wrong: u64,
}

fn first(page: usize, generation: u32) -> u64 {
    ((page as u64) << 32 | u64::from(generation)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl Memory {
    fn page(&mut self, page: usize) -> &mut [u64] {
        &mut self.words[page * WORDS..][..WORDS]
    }

    fn write(&mut self, page: usize) {
        let first = first(page, self.generations[page]);
        self.page(page).iter_mut().zip(0..).for_each(|(word, at)| *word = first.wrapping_add(at));
    }

    fn check(&mut self, page: usize) {
        let first = first(page, self.generations[page]);
        let good = self.page(page).iter().zip(0..).all(|(word, at)| *word == first.wrapping_add(at));
        self.wrong += u64::from(!good);
    }

    fn rewrite(&mut self, page: usize) {
        self.check(page);
        self.generations[page] += 1;
        self.write(page);
    }
}

fn main() -> io::Result<()> {
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|word| word.parse().ok()).collect();
    let [mib, hot, rate] = numbers[..] else { return Err(io::Error::other("usage: churn MIB HOT RATE")) };
    let pages = mib * 256;
    let mut memory = Memory { words: vec![0; pages * WORDS], generations: vec![0; pages], wrong: 0 };
    (0..pages).for_each(|page| memory.write(page));
    let hot = (pages * hot / 100).max(1);
    let (mut random, mut rewritten, mut next) = (88_172_645_463_325_252_u64, 0_usize, 0_usize);
    let began = Instant::now();
    for tick in 1_u64.. {
        let until = Duration::from_millis(100 * tick);
        while began.elapsed() < until {
            if rewritten as f64 > began.elapsed().as_secs_f64() * (rate * 256) as f64 {
                thread::sleep(Duration::from_millis(1));
                continue;
            }
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let among = if random % 10 == 0 { pages } else { hot };
            memory.rewrite((random >> 8) as usize % among);
            rewritten += 1;
        }
        if tick % 10 == 0 {
            let some = (pages / 64).max(1);
            (0..some).for_each(|_| {
                memory.check(next);
                next = (next + 1) % pages;
            });
        }
        let mut out = io::stdout().lock();
        writeln!(out, "churn {tick} {rewritten} {}", memory.wrong)?;
        out.flush()?;
    }
    Ok(())
}
