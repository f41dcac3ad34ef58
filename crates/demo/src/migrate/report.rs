//! The figures of the demo, and their picture.

use std::fmt;

use aquifer_cli::failure::Result;
use aquifer_cli::table::{Column, table};
use aquifer_page::Bytes;
use aquifer_vm::migrate::MigrationReport;
use serde::Serialize;

use crate::panel::{Picture, bars};

/// A move of the guest.
#[derive(Clone, Debug, Serialize)]
pub struct Move {
    /// Milliseconds from the order until the guest ran on the other host.
    pub total_ms: f64,
    /// The part of it in which the guest was paused, in milliseconds.
    pub downtime_ms: f64,
    /// The longest time between two answers of the guest, in milliseconds; a question came every 10
    /// ms.
    pub silence_ms: f64,
    /// Bytes of pages that were sent to the other host.
    pub bytes_pages: u64,
    /// Bytes of pages that were written to the pool.
    pub bytes_pool: u64,
    /// All other bytes that were sent.
    pub bytes_metadata: u64,
    /// Rounds of pre-copy, the last one included.
    pub rounds: u64,
    /// The mode: `instant`, or `qemu-precopy`.
    pub mode: String,
    /// Pages of the guest in the host's RAM at the beginning; for QEMU alone, all that are not
    /// zero.
    pub resident_pages: u64,
    /// Those of them that were nowhere else.
    pub dirty_pages: u64,
}

impl Move {
    pub(super) fn of(report: &MigrationReport) -> Self {
        let mode = serde_json::to_value(report.mode)
            .ok()
            .and_then(|mode| mode.as_str().map(str::to_owned));
        Self {
            total_ms: report.total_ms,
            downtime_ms: report.downtime_ms,
            silence_ms: 0.0,
            bytes_pages: report.bytes_pages,
            bytes_pool: report.bytes_pool,
            bytes_metadata: report.bytes_metadata,
            rounds: report.rounds.into(),
            mode: mode.unwrap_or_default(),
            resident_pages: report.resident_pages,
            dirty_pages: report.dirty_pages,
        }
    }

    fn bytes(&self) -> u64 {
        self.bytes_pages + self.bytes_pool + self.bytes_metadata
    }
}

/// The output of `aquifer demo migrate --json`.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// The guest's memory, in bytes.
    pub guest_bytes: Bytes,
    /// The part of it that is not zero, by QEMU's count.
    pub footprint_bytes: Bytes,
    /// Local RAM that Aquifer's guest may have on each host, in bytes.
    pub cache_bytes: Bytes,
    /// QEMU by itself, from host a to host b.
    pub qemu: Move,
    /// Aquifer, from host a to host b.
    pub there: Move,
    /// Aquifer, from host b to host a.
    pub back: Move,
    /// QEMU's total time divided by Aquifer's, the mean of both ways.
    pub speedup: f64,
    /// Aquifer's bytes, the mean of both ways, divided by QEMU's.
    pub data_ratio: f64,
    /// Pages that the guest found changed, with Aquifer.
    pub guest_errors: u64,
    /// The same with QEMU by itself, which sometimes loses writes of emulated guests.
    pub qemu_guest_errors: u64,
}

impl Summary {
    /// Fills in the ratios.
    pub(super) fn compared(self) -> Self {
        let mean = |of: fn(&Move) -> f64| f64::midpoint(of(&self.there), of(&self.back));
        let speedup = self.qemu.total_ms / mean(|is| is.total_ms).max(1e-9);
        let data_ratio = mean(|is| is.bytes() as f64) / (self.qemu.bytes() as f64).max(1.0);
        Self { speedup, data_ratio, ..self }
    }

    fn moves(&self) -> [(&'static str, &Move); 3] {
        [
            ("QEMU's pre-copy", &self.qemu),
            ("Aquifer, a to b", &self.there),
            ("Aquifer, b to a", &self.back),
        ]
    }

    /// Draws the picture, as PNG.
    pub(super) fn picture(&self) -> Result<Vec<u8>> {
        let panel = |title, unit, of: fn(&Move) -> f64| {
            bars(title, unit, self.moves().map(|(name, is)| (name, of(is))))
        };
        Picture {
            title: format!(
                "A guest of {} migrates while it writes to its memory; {} of it in local RAM",
                self.guest_bytes, self.cache_bytes
            ),
            columns: 2,
            height: 450.0,
            panels: vec![
                panel("Until it runs there", "ms", |is| is.total_ms),
                panel("Sent, to the host or the pool", "MB", |is| is.bytes() as f64 / 1e6),
                panel("Of that time it was paused", "ms", |is| is.downtime_ms),
                panel("Longest silence for its user", "ms", |is| is.silence_ms),
            ],
            legend: Vec::new(),
        }
        .png()
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "a guest of {}, {} of it not zero; \
             with Aquifer {} of it in local RAM, the rest in the pool",
            self.guest_bytes, self.footprint_bytes, self.cache_bytes
        )?;
        let numbers = ["total", "paused", "longest silence", "sent", "rounds"].map(Column::numbers);
        let rows = self.moves().into_iter().map(|(name, is)| {
            let [total, still, silence] =
                [is.total_ms, is.downtime_ms, is.silence_ms].map(|ms| format!("{ms:.0} ms"));
            let sent = format!("{:.1} MB", is.bytes() as f64 / 1e6);
            [name.to_owned(), total, still, silence, sent, is.rounds.to_string()]
        });
        writeln!(f, "{}", table([Column::from("")].into_iter().chain(numbers), rows))?;
        writeln!(
            f,
            "{:.1} times as fast, {:.0} % of the data; \
             pages that the guest found wrong: {} (QEMU's own: {})",
            self.speedup,
            self.data_ratio * 100.0,
            self.guest_errors,
            self.qemu_guest_errors
        )
    }
}
