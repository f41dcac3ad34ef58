//! Measures touches of a region's pages: `touches FILE fill|none read|write ORDER COUNT`.
//!
//! `fill` first writes all pages in order. With `none`, no page that is read may be of zeroes. The
//! orders `random` and `sequential` touch pages of the first half, each once. By then these have
//! left a local cache of at most half the region. `stride` touches each third of them. `uniform`
//! touches any page. `hot` touches one eighth of the pages, spread over the region, in nine of ten
//! cases. A size such as `256M` in place of the file selects the program's own memory. Prints one
//! line of JSON, with times in microseconds.

use std::env;
use std::error::Error;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_region_client::Region;

const WORDS: usize = PAGE_SIZE / 8;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<_> = env::args().skip(1).collect();
    let [file, fill, kind, order, count] = &args[..] else {
        return Err("usage: touches FILE fill|none read|write ORDER COUNT".into());
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
    if fill == "fill" {
        (0..pages).for_each(|page| words[page * WORDS].store(page as u64 + 1, Ordering::Relaxed));
    }
    let touched = touched(order, pages, count.parse()?);
    let mut times = Vec::with_capacity(touched.len());
    let started = Instant::now();
    for page in &touched {
        let word = &words[page * WORDS];
        let began = Instant::now();
        if kind == "write" {
            word.store(*page as u64 + 1, Ordering::Relaxed);
        } else if fill == "fill" {
            assert_eq!(word.load(Ordering::Relaxed), *page as u64 + 1, "page {page}");
        } else {
            assert_ne!(word.load(Ordering::Relaxed), 0, "page {page} is not from the engine");
        }
        times.push(began.elapsed());
    }
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
