//! The demo's picture: how much each group saves, and how much its guests get of it, over time.

use aquifer_cli::failure::Result;
use aquifer_group::balance::{BalanceRound, Balanced};
use aquifer_page::Bytes;
use kuva::plot::{LegendEntry, LegendShape, LinePlot};
use kuva::render::annotations::{ReferenceLine, TextAnnotation};
use kuva::render::plots::Plot;

use super::BASE;
use super::stage::{GROUPS, VMS};
use super::watch::{Watch, found};
use crate::panel::{Axes, Picture, entry, mib};

/// Colours that differ in greyscale, too, and for colour-blind readers.
const SAVED: &str = "#2e8b57";
const GUESTS: [&str; 2] = ["#3b7dd8", "#e08a1e"];
const SWAPPED: &str = "#c0392b";
const LINE: &str = "#555555";

/// Draws the history as PNG.
pub(super) fn draw(watch: &Watch) -> Result<Vec<u8>> {
    let history = watch.history();
    let end = history.last().map_or(1.0, |(at, _)| *at);
    let all = || history.iter().flat_map(|(_, turn)| &turn.groups);
    let most = all().flat_map(|group| group.vms.iter().map(|vm| vm.size)).max().unwrap_or(BASE);
    // Leaves room above the lines for the labels of events.
    let top = mib(most) * 1.25;
    let panel = |(index, group): (usize, &str)| {
        let axes = Axes { end, top, step: 64.0, is_last: index + 1 == GROUPS.len() };
        let own = ReferenceLine::horizontal(mib(BASE)).with_color(LINE).with_label("a guest's own");
        let layout = axes.layout(format!("group {group}")).with_reference_line(own);
        let layout = watch.marks.iter().fold(layout, |layout, (at, what)| {
            let text =
                TextAnnotation::new(*what, *at, top * 0.9).with_color(LINE).with_font_size(13);
            layout
                .with_reference_line(ReferenceLine::vertical(*at).with_color(LINE))
                .with_annotation(text)
        });
        (lines(&history, group), layout)
    };
    let entry = |label, colour| entry(label, colour, LegendShape::Line);
    Picture {
        title: "Memory that two groups save by sharing, and their guests' parts of it".to_owned(),
        columns: 1,
        height: 460.0,
        panels: GROUPS.into_iter().enumerate().map(panel).collect(),
        legend: vec![
            entry("saved by sharing", SAVED),
            entry("the first guest has", GUESTS[0]),
            entry("the second guest has", GUESTS[1]),
            LegendEntry {
                dasharray: Some("2 4".to_owned()),
                ..entry("they swapped in a second", SWAPPED)
            },
        ],
    }
    .png()
}

/// Returns the lines of a group.
fn lines(history: &[(f64, BalanceRound)], group: &str) -> Vec<Plot> {
    let of = |value: &dyn Fn(&BalanceRound) -> Option<Bytes>| {
        let points = history.iter().filter_map(|(at, turn)| Some((*at, mib(value(turn)?))));
        LinePlot::new().with_data(points).with_stroke_width(2.0)
    };
    let is = |found: &&Balanced| found.account.group.as_str() == group;
    let saved = of(&|turn| Some(turn.groups.iter().find(is)?.sharing.saved_bytes))
        .with_color(SAVED)
        .with_fill()
        .with_fill_opacity(0.25);
    let mut plots = vec![Plot::Line(saved)];
    for (vm, colour) in VMS.iter().filter(|vm| vm.group == group).zip(GUESTS) {
        plots.push(Plot::Line(of(&|turn| Some(found(turn, vm.name)?.size)).with_color(colour)));
    }
    let swapped =
        of(&|turn| Some(turn.groups.iter().find(is)?.vms.iter().map(|vm| vm.swapped).sum()))
            .with_color(SWAPPED)
            .with_dotted();
    plots.push(Plot::Line(swapped));
    plots
}
