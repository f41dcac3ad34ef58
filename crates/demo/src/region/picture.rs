//! The demo's picture: the times of fetches, and both throughputs.

use aquifer_cli::failure::Result;
use kuva::plot::BarPlot;
use kuva::render::figure::Figure;
use kuva::render::layout::Layout;
use kuva::render::plots::Plot;

use super::Summary;
use crate::session::png as rendered;

/// Draws the picture, as PNG.
pub(super) fn png(summary: &Summary) -> Result<Vec<u8>> {
    let fetches = summary.histogram.iter().fold(BarPlot::new(), |bars, bucket| {
        bars.with_bar(label(bucket.up_to_us), bucket.faults as f64)
    });
    let fetches = vec![Plot::Bar(fetches)];
    let throughput =
        BarPlot::new().with_bar("all in local RAM", summary.local_reads_per_s).with_bar(
            format!("{} of {} in local RAM", summary.local_bytes, summary.region_bytes),
            summary.reads_per_s,
        );
    let throughput = vec![Plot::Bar(throughput)];
    let layouts = vec![
        Layout::auto_from_plots(&fetches)
            .with_title("How long fetches of a page took")
            .with_x_label("up to")
            .with_y_label("fetches"),
        Layout::auto_from_plots(&throughput)
            .with_title("Values read a second")
            .with_y_label("reads a second"),
    ];
    let figure = Figure::new(1, 2)
        .with_title("memcached with its items in a region")
        .with_title_size(22)
        .with_figure_size(1280.0, 520.0)
        .with_plots(vec![fetches, throughput])
        .with_layouts(layouts);
    rendered(figure)
}

/// Formats a power of two of microseconds for people.
fn label(us: f64) -> String {
    if us < 1000.0 { format!("{us:.0} us") } else { format!("{:.0} ms", us / 1024.0) }
}
