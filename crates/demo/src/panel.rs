//! The panels of which the demos' pictures consist, and their form.

use aquifer_cli::failure::{Failure, Result};
use aquifer_page::Bytes;
use kuva::backend::raster::RasterBackend;
use kuva::plot::{BarPlot, LegendEntry, LegendShape};
use kuva::render::figure::{Figure, FigureLegendPosition};
use kuva::render::layout::{Layout, TickFormat};
use kuva::render::plots::Plot;

/// What a panel shows, and its axes.
pub(super) type Panel = (Vec<Plot>, Layout);

pub(super) fn mib(bytes: Bytes) -> f64 {
    bytes.0 as f64 / Bytes::mib(1).0 as f64
}

/// Makes a panel of bars with these names and values.
pub(super) fn bars<N: Into<String>>(
    title: &str,
    unit: &str,
    bars: impl IntoIterator<Item = (N, f64)>,
) -> Panel {
    let plots = vec![Plot::Bar(BarPlot::new().with_bars(bars))];
    let layout = Layout::auto_from_plots(&plots).with_title(title).with_y_label(unit);
    (plots, layout)
}

/// The axes of panels that show memory over time, one above the other.
#[derive(Clone, Copy)]
pub(super) struct Axes {
    /// The last second.
    pub(super) end: f64,
    /// The most memory, in MiB.
    pub(super) top: f64,
    /// Between two marks, in MiB.
    pub(super) step: f64,
    /// Whether this panel names the axis of time for all.
    pub(super) is_last: bool,
}

impl Axes {
    pub(super) fn layout(self, title: impl Into<String>) -> Layout {
        let layout = Layout::new((0.0, self.end), (0.0, self.top))
            .with_title(title)
            .with_title_size(17)
            .with_y_label("memory (MiB)")
            .with_label_size(14)
            .with_tick_size(12)
            .with_x_tick_format(TickFormat::Custom(std::sync::Arc::new(|second| {
                format!("{second:.0}")
            })))
            .with_x_axis_min(0.0)
            .with_x_axis_max(self.end)
            .with_y_axis_min(0.0)
            .with_y_axis_max(self.top)
            .with_y_tick_step(self.step);
        if self.is_last { layout.with_x_label("time (s)") } else { layout }
    }
}

pub(super) fn entry(label: &str, colour: &str, shape: LegendShape) -> LegendEntry {
    let (label, color) = (label.to_owned(), colour.to_owned());
    LegendEntry { label, color, shape, dasharray: None }
}

/// A picture of panels, `columns` of them side by side, with one legend for all.
pub(super) struct Picture {
    pub(super) title: String,
    pub(super) columns: usize,
    /// The height of a row of panels, in pixels.
    pub(super) height: f64,
    pub(super) panels: Vec<Panel>,
    pub(super) legend: Vec<LegendEntry>,
}

impl Picture {
    /// Draws the picture, as PNG.
    pub(super) fn png(self) -> Result<Vec<u8>> {
        let rows = self.panels.len().div_ceil(self.columns);
        let (plots, layouts) = self.panels.into_iter().unzip();
        let figure = Figure::new(rows, self.columns)
            .with_title(self.title)
            .with_title_size(22)
            .with_figure_size(1280.0, self.height * rows as f64)
            .with_spacing(18.0)
            .with_plots(plots)
            .with_layouts(layouts);
        let figure = match self.legend.is_empty() {
            true => figure,
            false => figure
                .with_shared_legend_position(FigureLegendPosition::BottomCenter)
                .with_shared_legend_entries(self.legend),
        };
        RasterBackend::new()
            .render_scene(&figure.render())
            .map_err(|why| Failure::new("drawing the picture", why))
    }
}
