//! The progress of long work, drawn on a terminal; in a pipe only notes appear, one a line.

use std::time::Duration;

use aquifer_page::Bytes;
use indicatif::{ProgressBar, ProgressStyle};

/// Work in progress, drawn on standard error if that is a terminal; its drop erases the drawing.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// Shows work of unknown length.
    pub fn spinner(what: impl Into<String>) -> Self {
        let bar = ProgressBar::no_length();
        bar.set_message(what.into());
        bar.enable_steady_tick(Duration::from_millis(120));
        Self(bar)
    }

    /// Shows work that is done when `total` bytes are.
    pub fn bytes(what: impl Into<String>, total: Bytes) -> Self {
        let bar = ProgressBar::new(total.0);
        let template = "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {eta}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(what.into());
        Self(bar)
    }

    /// Changes the text to the present step.
    pub fn say(&self, what: String) {
        self.0.set_message(what);
    }

    /// Prints a line on standard error that stays there: the event to wait for, and the longest
    /// wait.
    pub fn note(&self, text: &str) {
        if self.0.is_hidden() { eprintln!("{text}") } else { self.0.println(text) }
    }

    /// Shows how much is done, and of how much; the total may change.
    pub fn set(&self, done: Bytes, total: Bytes) {
        self.0.set_length(total.0);
        self.0.set_position(done.0);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
