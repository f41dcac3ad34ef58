//! The demo's picture: the times of fetches, and both throughputs.

use aquifer_cli::failure::Result;

use super::Summary;
use crate::panel::{Picture, bars};

/// Draws the picture, as PNG.
pub(super) fn png(summary: &Summary) -> Result<Vec<u8>> {
    let fetches = summary.histogram.iter();
    let fetches = fetches.map(|bucket| (label(bucket.up_to_us), bucket.faults as f64));
    let (fetches, axes) = bars("How long fetches of a page took", "fetches", fetches);
    let part =
        format!("{} of {} in local RAM", summary.memory.local_bytes, summary.memory.region_bytes);
    let local = ("all in local RAM".to_owned(), summary.throughput.local_reads_per_s);
    let reads = [local, (part, summary.throughput.reads_per_s)];
    Picture {
        title: "memcached with its items in a region".to_owned(),
        columns: 2,
        height: 520.0,
        panels: vec![
            (fetches, axes.with_x_label("up to")),
            bars("Values read a second", "reads a second", reads),
        ],
        legend: Vec::new(),
    }
    .png()
}

/// Formats a power of two of microseconds for people.
fn label(us: f64) -> String {
    if us < 1000.0 { format!("{us:.0} us") } else { format!("{:.0} ms", us / 1024.0) }
}
