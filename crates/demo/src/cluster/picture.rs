//! The demo's picture: the ledger of each host over time, with its decisions as marks.

use std::sync::Arc;

use aquifer_api::status::Decision;
use aquifer_cli::failure::Result;
use aquifer_page::Bytes;
use kuva::plot::{LegendShape, StackedAreaPlot};
use kuva::render::annotations::{ReferenceLine, TextAnnotation};
use kuva::render::layout::TickFormat;
use kuva::render::plots::Plot;

use super::stage::{HOSTS, RAM};
use super::watch::{Sample, Seen, Watched};
use crate::panel::{Axes, Panel, Picture, entry, mib};

/// A class in the picture: its name, its colour, and its memory in a reading.
type Class = (&'static str, &'static str, fn(&Sample) -> Bytes);

/// The classes from the bottom up, in colours that differ in greyscale, too.
const CLASSES: [Class; 5] = [
    ("the host's own programs", "#3b7dd8", |sample| sample.ledger.reserved),
    ("VMs, their caches and groups", "#2e8b57", |sample| {
        let ledger = &sample.ledger;
        ledger.vm_floor + ledger.vm_elastic + ledger.cache_floor + ledger.group_surplus
    }),
    ("lent, with pages of other hosts", "#d6558a", held),
    ("lent, still empty", "#f5bfd3", |sample| given(sample) - held(sample)),
    ("free", "#e3e9f2", |sample| sample.ledger.free),
];

fn held(sample: &Sample) -> Bytes {
    sample.stored.min(given(sample))
}

fn given(sample: &Sample) -> Bytes {
    sample.ledger.lent + sample.ledger.mirror
}

/// The colours of decisions, and of what the demo does to the hosts.
const DECISION: &str = "#555555";
const EVENT: &str = "#b03a00";

/// The first words of the decisions in the picture; the others follow from them.
const SHOWN: [&str; 7] = ["asks", "grants", "moves", "moved", "takes", "lends", "frees"];

/// The rows of labels above the areas, and the share of the panel that they take.
const ROWS: usize = 5;
const HEADROOM: f64 = 0.48;

/// The width of a label's letter, as a share of the time axis: 6.3 of 1180 pixels.
const LETTER: f64 = 6.3 / 1180.0;

/// A label is cut to so many letters.
const LONGEST: usize = 40;

/// A moment in the picture, with its text.
#[derive(Clone, Debug, PartialEq)]
struct Mark {
    at: f64,
    text: String,
    colour: &'static str,
}

/// Where a label is: its middle, and its row from the top.
type Place = (f64, usize);

/// Draws the observations as PNG.
pub(super) fn draw(seen: &Seen) -> Result<Vec<u8>> {
    let last = |host: &Watched| host.samples.last().map(|sample| sample.at);
    let end = seen.hosts.iter().filter_map(last).fold(1.0, f64::max);
    let panels = seen.hosts.iter().map(|host| panel(host, seen.began, end));
    Picture {
        title: "Four hosts keep a VM's memory: what each does with its RAM, and what it decides"
            .to_owned(),
        columns: 1,
        height: 380.0,
        panels: panels.collect(),
        legend: CLASSES
            .iter()
            .map(|(name, colour, _)| entry(name, colour, LegendShape::Rect))
            .chain([
                entry("a decision of the host's agent", DECISION, LegendShape::Line),
                entry("an event of the demo", EVENT, LegendShape::Line),
            ])
            .collect(),
    }
    .png()
}

fn panel(host: &Watched, began: f64, end: f64) -> Panel {
    let (all, top) = (mib(RAM), mib(RAM) / (1.0 - HEADROOM));
    let is_last = HOSTS.last() == Some(&host.name);
    let role = if HOSTS.first() == Some(&host.name) { ", on which the VM starts" } else { "" };
    let axes = Axes { end, top, step: 128.0, is_last };
    let numbers = move |tick| if tick > all { String::new() } else { format!("{tick:.0}") };
    let layout = axes
        .layout(format!("Host {}{role}", host.name.to_uppercase()))
        .with_y_tick_format(TickFormat::Custom(Arc::new(numbers)));
    let marks = marks(host, began);
    let labels = placed(&marks, end);
    let layout = marks.into_iter().zip(labels).fold(layout, |layout, (mark, label)| {
        let line = ReferenceLine::vertical(mark.at).with_color(mark.colour).with_stroke_width(1.0);
        let layout = layout.with_reference_line(line);
        let Some((middle, row)) = label else { return layout };
        // A row of the headroom stays free, most of it at the top.
        let height = top * (1.0 - HEADROOM * (row as f64 + 1.25) / (ROWS as f64 + 1.0));
        let text = TextAnnotation::new(mark.text, middle, height);
        layout.with_annotation(text.with_color(mark.colour).with_font_size(12))
    });
    (vec![areas(&host.samples)], layout)
}

/// Returns the events and decisions of a host, in order of time.
fn marks(host: &Watched, began: f64) -> Vec<Mark> {
    let is_shown =
        |decision: &&Decision| SHOWN.contains(&decision.what.split(' ').next().unwrap_or_default());
    let decided = host.decisions.iter().filter(is_shown).map(|decision| Mark {
        at: decision.at - began,
        text: short(&decision.what),
        colour: DECISION,
    });
    let events =
        host.events.iter().map(|(at, what)| Mark { at: *at, text: what.clone(), colour: EVENT });
    let mut marks: Vec<_> = events.chain(decided).filter(|mark| mark.at >= 0.0).collect();
    marks.sort_by(|a, b| a.at.total_cmp(&b.at));
    marks
}

fn areas(samples: &[Sample]) -> Plot {
    let stack = StackedAreaPlot::new().with_x(samples.iter().map(|sample| sample.at));
    let add = |stack: StackedAreaPlot, (_, colour, of): Class| {
        stack.with_series(samples.iter().map(move |sample| mib(of(sample)))).with_color(colour)
    };
    let stack = CLASSES.into_iter().fold(stack, add);
    Plot::StackedArea(stack.with_fill_opacity(0.9).with_strokes(false))
}

/// Places labels, in order of time, in rows in which none touches another; `None` for a mark
/// without room for its label.
fn placed(marks: &[Mark], end: f64) -> Vec<Option<Place>> {
    let mut free_from = [f64::NEG_INFINITY; ROWS];
    let place = |mark: &Mark| {
        let width = (mark.text.chars().count() + 1) as f64 * LETTER * end;
        let from = mark.at.min(end - width).max(0.0);
        let row = free_from.iter().position(|free| *free <= from)?;
        free_from[row] = from + width;
        Some((from + width / 2.0, row))
    };
    marks.iter().map(place).collect()
}

/// Shortens a decision: neither its numbers nor the ids of leases help to read a picture.
fn short(what: &str) -> String {
    let end = what.find([':', ',', ';', '(']).unwrap_or(what.len());
    let is_id = |word: &&str| word.len() >= 16 && word.chars().all(|c| c.is_ascii_hexdigit());
    let words = what[..end].split_whitespace().filter(|word| !is_id(word));
    let text = words.collect::<Vec<_>>().join(" ").replace(" as lease", "");
    if text.chars().count() <= LONGEST {
        return text;
    }
    text.chars().take(LONGEST - 1).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use aquifer_api::status::Ledger;

    use super::*;

    #[test]
    fn a_label_has_neither_ids_nor_reasons() {
        for (what, label) in [
            (
                "grants 192MiB to a for region web as lease 0123456789abcdef0123456789abcdef: 9 of",
                "grants 192MiB to a for region web",
            ),
            (
                "asks a to vacate lease 0123456789abcdef0123456789abcdef, which holds 90MiB: x",
                "asks a to vacate lease",
            ),
            ("recalls", "recalls"),
            ("", ""),
        ] {
            assert_eq!(short(what), label);
        }
        assert_eq!(short(&"ä".repeat(99)).chars().count(), LONGEST);
    }

    #[test]
    fn labels_of_one_row_do_not_overlap() {
        let mark = |n: u32| Mark {
            at: f64::from(n) * 0.7,
            text: "asks b for 192MiB".to_owned(),
            colour: DECISION,
        };
        let places = placed(&(0..40).map(mark).collect::<Vec<_>>(), 30.0);
        let width = ("asks b for 192MiB".len() + 1) as f64 * LETTER * 30.0;
        assert_eq!(places.len(), 40);
        for row in 0..ROWS {
            let of_row = places.iter().flatten().filter(|(_, of)| *of == row);
            let middles: Vec<_> = of_row.map(|(middle, _)| *middle).collect();
            assert!(!middles.is_empty());
            assert!(middles.windows(2).all(|pair| pair[1] - pair[0] >= width - 1e-9));
            assert!(middles.iter().all(|middle| middle + width / 2.0 <= 30.0 + 1e-9));
        }
    }

    #[test]
    fn a_picture_is_drawn_with_and_without_readings() {
        let ledger = |lent| Ledger {
            total: RAM,
            reserved: Bytes::mib(20),
            lent: Bytes::mib(lent),
            free: RAM - Bytes::mib(20 + lent),
            ..Ledger::default()
        };
        let sample = |at: u32| Sample {
            at: f64::from(at) / 4.0,
            ledger: ledger(if at > 20 { 192 } else { 0 }),
            stored: Bytes::mib(90),
        };
        let decided = |at, what: &str| Decision { at, what: what.to_owned(), about: Vec::new() };
        let host = |name| Watched {
            name,
            samples: (0..160).map(sample).collect(),
            events: vec![(4.0, "a program needs memory".to_owned())],
            decisions: vec![decided(105.0, "grants 192MiB to a"), decided(105.5, "frees lease")],
        };
        let mut seen =
            Seen { began: 100.0, hosts: HOSTS.into_iter().map(host).collect(), ..Seen::default() };
        let picture = draw(&seen).unwrap();
        assert!(picture.starts_with(b"\x89PNG"));
        if let Some(path) = std::env::var_os("AQUIFER_TEST_PICTURE") {
            std::fs::write(path, picture).unwrap();
        }
        seen.hosts.iter_mut().for_each(|host| host.samples.clear());
        draw(&seen).unwrap();
        seen.hosts.clear();
        draw(&seen).unwrap();
    }
}
