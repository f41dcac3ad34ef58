//! The load of a guest that moves: it checks and rewrites its memory all the time.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;

/// How often the load reports.
const TICK: Duration = Duration::from_millis(100);

/// The size and speed of a load.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// MiB that it fills first.
    pub mib: usize,
    /// Percent of those that nine of ten writes go to.
    pub hot: usize,
    /// MiB that it checks and rewrites a second at most.
    pub rate: usize,
    /// The seed of the content: pages of different seeds differ.
    pub seed: u8,
}

/// A report of the load so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// The number of this report, from 1.
    pub tick: u64,
    /// Pages checked and rewritten.
    pub pages: u64,
    /// Pages with wrong content.
    pub wrong: u64,
}

struct ChurnMemory {
    words: Vec<u64>,
    generations: Vec<u32>,
    seed: u8,
    wrong: u64,
}

fn first(seed: u8, page: usize, generation: u32) -> u64 {
    (u64::from(seed) << 56 ^ (page as u64) << 32 ^ u64::from(generation))
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl ChurnMemory {
    fn page(&mut self, page: usize) -> &mut [u64] {
        &mut self.words[page * WORDS..][..WORDS]
    }

    fn write(&mut self, page: usize) {
        let first = first(self.seed, page, self.generations[page]);
        self.page(page).iter_mut().zip(0..).for_each(|(word, at)| *word = first.wrapping_add(at));
    }

    fn check(&mut self, page: usize) {
        let first = first(self.seed, page, self.generations[page]);
        let good =
            self.page(page).iter().zip(0..).all(|(word, at)| *word == first.wrapping_add(at));
        self.wrong += u64::from(!good);
    }

    fn rewrite(&mut self, page: usize) {
        self.check(page);
        self.generations[page] += 1;
        self.write(page);
    }
}

/// Fills memory, then checks and rewrites random pages, and reports ten times a second.
///
/// Each tenth report also covers a check of the next 1/64 of all pages, in order. The load ends
/// when `tell` fails.
///
/// # Errors
/// The error of `tell`.
pub fn run(load: Load, mut tell: impl FnMut(Told) -> io::Result<()>) -> io::Result<()> {
    let pages = load.mib * 256;
    let mut memory = ChurnMemory {
        words: vec![0; pages * WORDS],
        generations: vec![0; pages],
        seed: load.seed,
        wrong: 0,
    };
    (0..pages).for_each(|page| memory.write(page));
    let hot = (pages * load.hot / 100).max(1);
    let (mut random, mut rewritten, mut next) = (88_172_645_463_325_252_u64, 0_u64, 0_usize);
    let began = Instant::now();
    for tick in 1_u32.. {
        let until = TICK * tick;
        while began.elapsed() < until {
            if rewritten as f64 > began.elapsed().as_secs_f64() * (load.rate * 256) as f64 {
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
        tell(Told { tick: tick.into(), pages: rewritten, wrong: memory.wrong })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_changes_by_itself_is_found() {
        let mut memory =
            ChurnMemory { words: vec![0; 2 * WORDS], generations: vec![0; 2], seed: 0, wrong: 0 };
        (0..2).for_each(|page| memory.write(page));
        memory.rewrite(1);
        memory.check(0);
        assert_eq!(memory.wrong, 0);
        // The page is one write ahead of its generation.
        memory.generations[1] -= 1;
        memory.check(1);
        memory.words[7] ^= 1;
        memory.check(0);
        assert_eq!(memory.wrong, 2);
    }

    #[test]
    fn it_tells_how_it_goes_until_nobody_listens() {
        let mut told = Vec::new();
        let ended = run(Load { mib: 1, hot: 50, rate: 4, seed: 0 }, |is| {
            told.push(is);
            if told.len() == 3 { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(()) }
        });
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        assert!(
            told[2].tick == 3 && told[2].wrong == 0 && told[2].pages > told[0].pages,
            "{told:?}"
        );
    }
}
