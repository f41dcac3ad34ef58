//! `churn MIB HOT RATE [SEED]` keeps a guest busy in tests and measurements
//! (`aquifer_demo::churn`). Ten times a second it prints `churn TICK PAGES WRONG`.

use std::io::{self, Write as _};

use aquifer_demo::churn::{Load, run};

fn main() -> io::Result<()> {
    let numbers: Vec<usize> =
        std::env::args().skip(1).filter_map(|word| word.parse().ok()).collect();
    let ([mib, hot, rate] | [mib, hot, rate, _]) = numbers[..] else {
        return Err(io::Error::other("usage: churn MIB HOT RATE [SEED]"));
    };
    let seed = numbers.get(3).map_or(Ok(0), |&seed| seed.try_into()).map_err(io::Error::other)?;
    run(Load { mib, hot, rate, seed }, |is| {
        let mut out = io::stdout().lock();
        writeln!(out, "churn {} {} {}", is.tick, is.pages, is.wrong)?;
        out.flush()
    })
}
