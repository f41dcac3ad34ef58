//! `churn MIB HOT RATE [SEED]` keeps a guest busy in tests and measurements
//! (`aquifer_demo::churn`). First it prints `began MILLISECONDS`, by which a guest that started
//! again is told from one that went on. Ten times a second it prints `churn TICK PAGES WRONG`.

use std::io::{self, Write as _};
use std::time::SystemTime;

use aquifer_demo::churn::{Load, run};

fn main() -> io::Result<()> {
    let numbers: Vec<usize> =
        std::env::args().skip(1).filter_map(|word| word.parse().ok()).collect();
    let ([mib, hot, rate] | [mib, hot, rate, _]) = numbers[..] else {
        return Err(io::Error::other("usage: churn MIB HOT RATE [SEED]"));
    };
    let seed = numbers.get(3).map_or(Ok(0), |&seed| seed.try_into()).map_err(io::Error::other)?;
    let began = SystemTime::UNIX_EPOCH.elapsed().map_err(io::Error::other)?;
    writeln!(io::stdout().lock(), "began {}", began.as_millis())?;
    run(Load { mib, hot, rate, seed }, |is| {
        let mut out = io::stdout().lock();
        writeln!(out, "churn {} {} {}", is.tick, is.pages, is.wrong)?;
        out.flush()
    })
}
