//! The figures of the demo, and their picture.

use std::collections::BTreeMap;
use std::fmt;

use aquifer_cli::failure::Result;
use aquifer_cli::table::table;
use aquifer_page::Bytes;
use aquifer_vm::memory::Resized;
use serde::Serialize;

use crate::panel::{Picture, bars, mib};

/// A resize of the guest.
#[derive(Clone, Debug, Serialize)]
pub struct Step {
    /// The guest's memory before, in bytes.
    pub from: Bytes,
    /// The requested memory, in bytes.
    pub to: Bytes,
    /// The memory reached, in bytes.
    pub reached: Bytes,
    /// Why `reached` differs from `to`, in words.
    pub why: Option<String>,
    /// Whether the guest has confirmed that it can use the added memory; `None` if it got none.
    pub usable: Option<bool>,
    /// Milliseconds from the request to the answer.
    pub total_ms: f64,
    /// The time of each stage, in microseconds.
    ///
    /// The host measures `backend_reservation`, `request_reply`, `confirmation`, `backend_release`
    /// and `total`; the guest's kernel measures the rest.
    pub stages: BTreeMap<String, f64>,
    /// Bytes that a process in the guest held and had checked after the step.
    pub held: Bytes,
    /// RAM of this host that the guest's memory took then, in bytes.
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

/// The output of `aquifer demo resize --json`.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// The place of the guest's memory: `local` or `pool`.
    pub memory: &'static str,
    /// All resizes, in order.
    pub steps: Vec<Step>,
    /// Errors that the guest's kernel logged during the resizes, plus MiB of its process's memory
    /// with wrong content.
    pub guest_errors: u64,
    /// RAM of this host that the guest's memory took before the first resize, in bytes.
    pub host_bytes_before: Bytes,
    /// The same after the last resize.
    pub host_bytes_after: Bytes,
}

impl Summary {
    /// Draws the picture, as PNG.
    pub(super) fn picture(&self) -> Result<Vec<u8>> {
        let panel = |title, unit, of: &dyn Fn(&Step) -> f64| {
            let (plots, axes) =
                bars(title, unit, self.steps.iter().map(|step| (step.name(), of(step))));
            (plots, axes.with_x_tick_rotate(-20.0))
        };
        let time = "Time of each resize, until the guest can use it or it is back";
        Picture {
            title: "A guest whose memory grows and shrinks while it runs".to_owned(),
            columns: 2,
            height: 450.0,
            panels: vec![
                panel(time, "ms", &|is| is.total_ms),
                panel("The guest's memory after it", "MiB", &|is| mib(is.reached)),
                panel("Held and checked by a process in the guest", "MiB", &|is| mib(is.held)),
                panel("RAM of this host that it took", "MiB", &|is| mib(is.host_bytes)),
            ],
            legend: Vec::new(),
        }
        .png()
    }
}

/// The stages of the table, in the order in which they happen, and their names for people.
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
        let columns =
            [vec!["milliseconds".to_owned()], self.steps.iter().map(Step::name).collect()];
        let mut rows: Vec<Vec<String>> = Vec::new();
        let mut add = |name: &str, cells: &mut dyn Iterator<Item = String>| {
            rows.push(std::iter::once(name.to_owned()).chain(cells).collect());
        };
        for (stage, name) in SHOWN {
            let mut cells = self.steps.iter().map(|step| {
                step.stages
                    .get(stage)
                    .map_or_else(|| "-".to_owned(), |us| format!("{:.1}", us / 1e3))
            });
            add(name, &mut cells);
        }
        add("total", &mut self.steps.iter().map(|step| format!("{:.1}", step.total_ms)));
        for (name, of) in [
            ("guest has", (|step| step.reached) as fn(&Step) -> Bytes),
            ("process holds", |step| step.held),
            ("host gives", |step| step.host_bytes),
        ] {
            add(name, &mut self.steps.iter().map(|step| of(step).to_string()));
        }
        writeln!(f, "{}", table(columns.concat(), rows))?;
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
