//! What is left of the demo: figures, and their picture.

use std::collections::BTreeMap;
use std::fmt;

use aquifer_guest::memory::Resized;
use aquifer_page::Bytes;
use kuva::plot::BarPlot;
use kuva::render::figure::Figure;
use kuva::render::layout::Layout;
use kuva::render::plots::Plot;
use serde::Serialize;

use crate::demo::begun::png;
use crate::failure::Result;

/// A resize of the guest.
#[derive(Clone, Debug, Serialize)]
pub struct Step {
    /// What it had.
    pub from: Bytes,
    /// What it was to have.
    pub to: Bytes,
    /// What it got.
    pub reached: Bytes,
    /// Why that is not the same, in words.
    pub why: Option<String>,
    /// Whether the guest has said that it can use what it got; nothing where it got nothing.
    pub usable: Option<bool>,
    /// From the request to the answer.
    pub total_ms: f64,
    /// What that was spent on, in microseconds: `backend_reservation`, `request_reply`, `confirmation`, `backend_release` and `total` as the host has it,
    /// the rest as the guest's kernel does.
    pub stages: BTreeMap<String, f64>,
    /// What a process in the guest held and had checked when the step was over.
    pub held: Bytes,
    /// RAM of this host that the guest's memory took then.
    pub host_bytes: Bytes,
}

impl Step {
    pub(super) fn of(resized: &Resized, held: Bytes, host_bytes: Bytes) -> Self {
        Self {
            from: resized.from,
            to: resized.to,
            reached: resized.reached,
            why: resized.why.as_ref().map(ToString::to_string),
            usable: resized.usable,
            total_ms: resized.total_ms,
            stages: resized.stages.iter().map(|took| (took.stage.clone(), took.us)).collect(),
            held,
            host_bytes,
        }
    }

    fn name(&self) -> String {
        format!("{} to {}", self.from, self.to)
    }
}

/// What `aquifer demo resize --json` prints.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Where the guest's memory was: `local` or `pool`.
    pub memory: &'static str,
    /// Each resize.
    pub steps: Vec<Step>,
    /// Errors in the log of the guest's kernel that came with the resizes, and MiB of its process's memory that were not what they must be.
    pub guest_errors: u64,
    /// RAM of this host that the guest's memory took before the first.
    pub host_bytes_before: Bytes,
    /// And after the last.
    pub host_bytes_after: Bytes,
}

impl Summary {
    /// The picture, as PNG.
    pub(super) fn picture(&self) -> Result<Vec<u8>> {
        let bars = |of: &dyn Fn(&Step) -> f64| {
            let bars =
                self.steps.iter().fold(BarPlot::new(), |bars, is| bars.with_bar(is.name(), of(is)));
            vec![Plot::Bar(bars)]
        };
        let mib = |bytes: Bytes| bytes.0 as f64 / f64::from(1 << 20);
        let plots = vec![
            bars(&|is| is.total_ms),
            bars(&|is| mib(is.reached)),
            bars(&|is| mib(is.held)),
            bars(&|is| mib(is.host_bytes)),
        ];
        let titles = [
            ("Time of each resize, until the guest can use it or it is back", "ms"),
            ("The guest's memory after it", "MiB"),
            ("Held and checked by a process in the guest", "MiB"),
            ("RAM of this host that it took", "MiB"),
        ];
        let layouts = plots.iter().zip(titles).map(|(plots, (title, unit))| {
            Layout::auto_from_plots(plots)
                .with_title(title)
                .with_y_label(unit)
                .with_x_tick_rotate(-20.0)
        });
        let layouts = layouts.collect();
        let figure = Figure::new(2, 2)
            .with_title("A guest whose memory grows and shrinks while it runs")
            .with_title_size(22)
            .with_figure_size(1280.0, 900.0)
            .with_plots(plots)
            .with_layouts(layouts);
        png(figure)
    }
}

/// The stages that are shown, in the order in which they happen, and their names for people.
const SHOWN: [(&str, &str); 11] = [
    ("backend_reservation", "reserve"),
    ("page_table_build", "page tables"),
    ("section_init", "section init"),
    ("onlining", "online"),
    ("sub_block_offlining", "isolate"),
    ("offlining", "offline"),
    ("section_clean_up", "clean up"),
    ("page_table_destroy", "tables gone"),
    ("request_reply", "request-reply"),
    ("confirmation", "confirm"),
    ("backend_release", "release"),
];

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = comfy_table::Table::new();
        table.load_style(comfy_table::presets::NOTHING);
        let mut head = vec!["milliseconds".to_owned()];
        head.extend(self.steps.iter().map(Step::name));
        table.set_header(head);
        for (stage, name) in SHOWN {
            let cells = self.steps.iter().map(|step| {
                step.stages
                    .get(stage)
                    .map_or_else(|| "-".to_owned(), |us| format!("{:.1}", us / 1e3))
            });
            table.add_row(std::iter::once(name.to_owned()).chain(cells));
        }
        let totals = self.steps.iter().map(|step| format!("{:.1}", step.total_ms));
        table.add_row(std::iter::once("total".to_owned()).chain(totals));
        for (name, of) in [
            ("guest has", (|step| step.reached) as fn(&Step) -> Bytes),
            ("process holds", |step| step.held),
            ("host gives", |step| step.host_bytes),
        ] {
            let cells = self.steps.iter().map(|step| of(step).to_string());
            table.add_row(std::iter::once(name.to_owned()).chain(cells));
        }
        writeln!(f, "{table}")?;
        for step in self.steps.iter().filter(|step| step.why.is_some()) {
            writeln!(f, "{}: {}", step.name(), step.why.as_deref().unwrap_or_default())?;
        }
        writeln!(
            f,
            "guest errors: {}; RAM of this host: {} before, {} after",
            self.guest_errors, self.host_bytes_before, self.host_bytes_after
        )
    }
}
