//! The demo's picture: how much each group saves, and how much its guests get of it, over time.

use aquifer_cli::failure::Result;
use aquifer_group::balance::{BalanceRound, Balanced};
use aquifer_page::Bytes;
use kuva::plot::{LegendEntry, LegendShape, LinePlot};
use kuva::render::annotations::{ReferenceLine, TextAnnotation};
use kuva::render::figure::{Figure, FigureLegendPosition};
use kuva::render::layout::{Layout, TickFormat};
use kuva::render::plots::Plot;

use super::BASE;
use super::stage::{GROUPS, VMS};
use super::watch::{Watch, found};
use crate::session::png;

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
        let layout = Layout::new((0.0, end), (0.0, top))
            .with_title(format!("group {group}"))
            .with_title_size(17)
            .with_y_label("MiB")
            .with_x_tick_format(TickFormat::Custom(std::sync::Arc::new(|second| {
                format!("{second:.0}")
            })))
            .with_x_axis_min(0.0)
            .with_x_axis_max(end)
            .with_y_axis_min(0.0)
            .with_y_axis_max(top)
            .with_y_tick_step(64.0)
            .with_reference_line(
                ReferenceLine::horizontal(mib(BASE)).with_color(LINE).with_label("a guest's own"),
            );
        let layout =
            if index + 1 == GROUPS.len() { layout.with_x_label("time (s)") } else { layout };
        watch.marks.iter().fold(layout, |layout, (at, what)| {
            let text =
                TextAnnotation::new(*what, *at, top * 0.9).with_color(LINE).with_font_size(13);
            layout
                .with_reference_line(ReferenceLine::vertical(*at).with_color(LINE))
                .with_annotation(text)
        })
    };
    let figure = Figure::new(GROUPS.len(), 1)
        .with_title("Memory that two groups save by sharing, and their guests' parts of it")
        .with_title_size(22)
        .with_figure_size(1280.0, 460.0 * GROUPS.len() as f64)
        .with_spacing(18.0)
        .with_plots(GROUPS.iter().map(|group| lines(&history, group)).collect())
        .with_layouts(GROUPS.into_iter().enumerate().map(panel).collect())
        .with_shared_legend_position(FigureLegendPosition::BottomCenter)
        .with_shared_legend_entries(legend());
    png(figure)
}

fn legend() -> Vec<LegendEntry> {
    let entry = |label: &str, color: &str, dasharray: Option<&str>| LegendEntry {
        label: label.to_owned(),
        color: color.to_owned(),
        shape: LegendShape::Line,
        dasharray: dasharray.map(str::to_owned),
    };
    vec![
        entry("saved by sharing", SAVED, None),
        entry("the first guest has", GUESTS[0], None),
        entry("the second guest has", GUESTS[1], None),
        entry("they swapped in a second", SWAPPED, Some("2 4")),
    ]
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

fn mib(bytes: Bytes) -> f64 {
    bytes.0 as f64 / Bytes::mib(1).0 as f64
}
