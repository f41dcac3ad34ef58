//! Measures touches of a region's pages: `touches FILE fill|pause|none read|write ORDER COUNT
//! [THREADS]`.
//!
//! `fill` first writes all pages in order. `pause` does too, prints a line, and waits for one. With
//! `none`, no page that is read may be of zeroes. Each thread touches its share of the pages. The
//! orders `random` and `sequential` touch pages of the first half, each once. By then these have
//! left a local cache of at most half the region. `stride` touches each third of them. `uniform`
//! touches any page. `hot` touches one eighth of the pages, spread over the region, in nine of ten
//! cases. A size such as `256M` in place of the file selects the program's own memory. Prints one
//! line of JSON, with times in microseconds.

use std::env;
use std::error::Error;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_region_client::Region;

const WORDS: usize = PAGE_SIZE / 8;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<_> = env::args().skip(1).collect();
    let (file, fill, kind, order, count, threads) = match &args[..] {
        [file, fill, kind, order, count] => (file, fill, kind, order, count, 1),
        [file, fill, kind, order, count, threads] => {
            (file, fill, kind, order, count, threads.parse()?)
        }
        _ => {
            let usage = "usage: touches FILE fill|pause|none read|write ORDER COUNT [THREADS]";
            return Err(usage.into());
        }
    };
    let region: Region;
    let own: Vec<AtomicU64>;
    let words = match file.parse::<Bytes>() {
        Ok(size) => {
            own = (0..size.pages() * WORDS as u64).map(AtomicU64::new).collect();
            &own
        }
        Err(_) => {
            region = Region::map(Path::new(file))?;
            region.words()
        }
    };
    let pages = words.len() / WORDS;
    if fill != "none" {
        (0..pages).for_each(|page| words[page * WORDS].store(page as u64 + 1, Ordering::Relaxed));
    }
    if fill == "pause" {
        println!("filled");
        io::stdin().read_line(&mut String::new())?;
    }
    let touched = touched(order, pages, count.parse()?);
    let is_filled = fill != "none";
    let touch = |page: &usize| touch(&words[page * WORDS], *page, kind == "write", is_filled);
    let started = Instant::now();
    let mut times: Vec<Duration> = thread::scope(|scope| {
        let shares = touched.chunks(touched.len().div_ceil(threads).max(1));
        let run = |share: &'_ [usize]| share.iter().map(touch).collect::<Vec<_>>();
        let running: Vec<_> = shares.map(|share| scope.spawn(move || run(share))).collect();
        running.into_iter().flat_map(|thread| thread.join().expect("each page is right")).collect()
    });
    let seconds = started.elapsed().as_secs_f64();
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
    println!(
        r#"{{"touches":{},"pages_per_s":{:.0},"p50_us":{:.2},"p99_us":{:.2},"p999_us":{:.2}}}"#,
        times.len(),
        times.len() as f64 / seconds,
        at(0.5),
        at(0.99),
        at(0.999)
    );
    Ok(())
}

/// Touches a page, and returns how long that took. If the page is filled, checks what is read.
fn touch(word: &AtomicU64, page: usize, is_write: bool, is_filled: bool) -> Duration {
    let began = Instant::now();
    if is_write {
        word.store(page as u64 + 1, Ordering::Relaxed);
    } else if is_filled {
        assert_eq!(word.load(Ordering::Relaxed), page as u64 + 1, "page {page}");
    } else {
        assert_ne!(word.load(Ordering::Relaxed), 0, "page {page} is not from the engine");
    }
    began.elapsed()
}

/// Returns the pages to touch, in order.
fn touched(order: &str, pages: usize, count: usize) -> Vec<usize> {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut below = |end: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 16) as usize % end
    };
    // One page of each eight is hot, at a varying position.
    let hot = |number: usize| number * 8 + number.wrapping_mul(0x9e37_79b9) / 64 % 8;
    let mut half: Vec<_> = (0..pages / 2).collect();
    match order {
        "uniform" => (0..count).map(|_| below(pages)).collect(),
        "hot" => (0..count)
            .map(|_| if below(10) < 9 { hot(below(pages / 8)) } else { below(pages) })
            .collect(),
        "stride" => half.into_iter().step_by(3).take(count).collect(),
        _ => {
            for last in (1..half.len()).rev().filter(|_| order == "random") {
                half.swap(last, below(last + 1));
            }
            half.truncate(count);
            half
        }
    }
}
