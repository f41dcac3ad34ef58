//! The picture of a demo, after \[Ge23\], Fig. 10: RAM and swap of both hosts over time.
//!
//! It also shows the RAM limit, the thresholds and the roles.

use aquifer_api::status::Role;
use aquifer_cli::failure::Result;
use aquifer_page::Bytes;
use kuva::plot::{LegendShape, StackedAreaPlot};
use kuva::render::annotations::{ReferenceLine, ShadedRegion, TextAnnotation};
use kuva::render::layout::Layout;
use kuva::render::plots::Plot;

use super::panel::{Axes, Picture, entry, mib};

/// The memory of one host over time.
#[derive(Debug, Clone)]
pub struct History {
    /// The panel's title.
    pub title: String,
    /// All its RAM, in bytes.
    pub limit: Bytes,
    /// The threshold above which it borrows, in bytes.
    pub upper: Bytes,
    /// The threshold below which it returns, in bytes.
    pub lower: Bytes,
    /// The readings, in the order of time.
    pub samples: Vec<Sample>,
}

/// One reading of a host.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// Seconds since the demo began.
    pub at: f64,
    /// RAM in use, in bytes; includes `lent`.
    pub ram: Bytes,
    /// Bytes swapped out to borrowed memory.
    pub swap: Bytes,
    /// Bytes of RAM that hold other hosts' pages.
    pub lent: Bytes,
    /// The host's role.
    pub role: Role,
}

/// Colours that differ in greyscale, too, and for colour-blind readers.
mod colour {
    pub(super) const RAM: &str = "#3b7dd8";
    pub(super) const LENT: &str = "#86b6f5";
    pub(super) const SWAP: &str = "#f08fb4";
    pub(super) const LIMIT: &str = "#333333";
    pub(super) const UPPER: &str = "#c0392b";
    pub(super) const LOWER: &str = "#2e8b57";
    pub(super) const BORROWER: &str = "#f08fb4";
    pub(super) const LENDER: &str = "#86b6f5";
    pub(super) const ROLE_TEXT: &str = "#555555";
}

/// Draws the histories one above the other, over one time axis, as PNG.
///
/// # Errors
/// If the drawing library fails.
pub fn png(title: &str, histories: &[History]) -> Result<Vec<u8>> {
    let end = histories
        .iter()
        .filter_map(|history| history.samples.last())
        .map(|last| last.at)
        .fold(1.0, f64::max);
    let last = histories.len().saturating_sub(1);
    let panels = histories.iter().enumerate();
    let panels = panels.map(|(n, history)| (areas(history), layout(history, end, n == last)));
    Picture {
        title: title.to_owned(),
        columns: 1,
        height: 460.0,
        panels: panels.collect(),
        legend: vec![
            entry("RAM, own pages", colour::RAM, LegendShape::Rect),
            entry("RAM, pages of others", colour::LENT, LegendShape::Rect),
            entry("swap, own pages in others' RAM", colour::SWAP, LegendShape::Rect),
        ],
    }
    .png()
}

/// Returns the stacked areas: own pages in RAM, pages of others, and own pages in swap.
fn areas(history: &History) -> Vec<Plot> {
    let of =
        |value: fn(&Sample) -> Bytes| history.samples.iter().map(move |sample| mib(value(sample)));
    let stack = StackedAreaPlot::new()
        .with_x(history.samples.iter().map(|sample| sample.at))
        .with_series(of(|sample| sample.ram.saturating_sub(sample.lent)))
        .with_color(colour::RAM)
        .with_series(of(|sample| sample.lent))
        .with_color(colour::LENT)
        .with_series(of(|sample| sample.swap))
        .with_color(colour::SWAP)
        .with_fill_opacity(0.85)
        .with_strokes(false);
    vec![Plot::StackedArea(stack)]
}

fn layout(history: &History, end: f64, is_last: bool) -> Layout {
    let most = history
        .samples
        .iter()
        .map(|sample| mib(sample.ram + sample.swap))
        .fold(mib(history.limit), f64::max);
    // Leaves room above the areas for the names of the roles.
    let top = most * 1.18;
    let line = |value, colour, text: &str| {
        ReferenceLine::horizontal(mib(value))
            .with_color(colour)
            .with_stroke_width(1.4)
            .with_label(text)
    };
    // A power of two, as memory sizes are.
    let step = (mib(history.limit) as u64 / 6).next_power_of_two() as f64;
    let layout = Axes { end, top, step, is_last }
        .layout(&history.title)
        .with_reference_line(line(history.limit, colour::LIMIT, "all RAM").with_dasharray(""))
        .with_reference_line(line(history.upper, colour::UPPER, "borrow above"))
        .with_reference_line(line(history.lower, colour::LOWER, "return below"));
    roles(history, end).into_iter().fold(layout, |layout, band| band.draw(layout, end, top))
}

/// A stretch of time in one role.
#[derive(Debug, PartialEq)]
struct Band {
    from: f64,
    to: f64,
    role: Role,
}

impl Band {
    fn draw(&self, layout: Layout, end: f64, top: f64) -> Layout {
        let name =
            TextAnnotation::new(self.role.to_string(), (self.from + self.to) / 2.0, top * 0.93)
                .with_color(colour::ROLE_TEXT)
                .with_font_size(13);
        // A short band has no room for its name.
        let layout =
            if self.to - self.from < end / 18.0 { layout } else { layout.with_annotation(name) };
        let tint = match self.role {
            Role::Neutral => return layout,
            Role::Borrower => colour::BORROWER,
            Role::Lender => colour::LENDER,
        };
        let region = ShadedRegion::vertical(self.from, self.to).with_color(tint).with_opacity(0.18);
        layout.with_shaded_region(region)
    }
}

/// Returns the roles over time. Each lasts until the reading that shows the next, the last until
/// `end`.
fn roles(history: &History, end: f64) -> Vec<Band> {
    let mut bands: Vec<Band> = Vec::new();
    for sample in &history.samples {
        match bands.last_mut() {
            Some(band) if band.role == sample.role => {}
            last => {
                let from = if let Some(band) = last {
                    band.to = sample.at;
                    sample.at
                } else {
                    0.0
                };
                bands.push(Band { from, to: end, role: sample.role });
            }
        }
    }
    bands
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at: f64, ram: u64, swap: u64, lent: u64, role: Role) -> Sample {
        Sample { at, ram: Bytes::mib(ram), swap: Bytes::mib(swap), lent: Bytes::mib(lent), role }
    }

    /// Returns the readings of a typical demo: A borrows from B, gives back, then lends.
    fn histories() -> Vec<History> {
        let history = |title: &str, samples| History {
            title: title.to_owned(),
            limit: Bytes::mib(256),
            upper: Bytes::mib(204),
            lower: Bytes::mib(153),
            samples,
        };
        let ramp = |at: f64, from: f64, to: f64, most: f64| {
            (((at - from) / (to - from)).clamp(0.0, 1.0) * most * 10.0) as u64 / 10
        };
        let mut overloaded = Vec::new();
        let mut neighbour = Vec::new();
        for tick in 0..240 {
            let at = f64::from(tick) / 4.0;
            let second = at >= 30.0;
            let t = if second { at - 30.0 } else { at };
            let load = if t < 25.0 { ramp(t, 2.0, 14.0, 384.0) } else { 0 };
            let swap = load.saturating_sub(210);
            let roles = if swap > 0 {
                (Role::Borrower, Role::Lender)
            } else {
                (Role::Neutral, Role::Neutral)
            };
            let borrower = sample(at, 20 + load.min(210), swap, 0, roles.0);
            let lender = sample(at, 20 + swap, 0, swap, roles.1);
            overloaded.push(if second { lender } else { borrower });
            neighbour.push(if second { borrower } else { lender });
        }
        vec![history("Host A", overloaded), history("Host B", neighbour)]
    }

    #[test]
    fn roles_follow_one_another_without_gaps() {
        let bands = roles(&histories()[0], 60.0);
        let names: Vec<_> = bands.iter().map(|band| band.role.to_string()).collect();
        assert_eq!(names, ["neutral", "borrower", "neutral", "lender", "neutral"]);
        assert!(bands.windows(2).all(|pair| pair[0].to == pair[1].from));
        assert_eq!((bands[0].from, bands[4].to), (0.0, 60.0));
    }

    #[test]
    fn the_picture_is_a_png_of_both_hosts() {
        let picture = png("Two hosts share their memory", &histories()).unwrap();
        assert!(picture.starts_with(b"\x89PNG"));
        if let Some(path) = std::env::var_os("AQUIFER_TEST_PICTURE") {
            std::fs::write(path, picture).unwrap();
        }
    }

    #[test]
    fn a_demo_that_was_cut_short_still_gives_a_picture() {
        let mut histories = histories();
        histories.iter_mut().for_each(|history| history.samples.truncate(1));
        png("x", &histories).unwrap();
        histories.iter_mut().for_each(|history| history.samples.clear());
        png("x", &histories).unwrap();
    }
}
