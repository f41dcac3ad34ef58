//! Progress of long work: shown on a terminal. In a pipe only what is waited for is told, a line each.

use std::time::Duration;

use aquifer_page::Bytes;
use indicatif::{ProgressBar, ProgressStyle};

/// Something that goes on, shown on standard error while it does; indicatif draws nothing where that is no terminal.
/// Dropping it wipes it away.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// Work of unknown length.
    pub fn spinner(what: impl Into<String>) -> Self {
        let bar = ProgressBar::no_length();
        bar.set_message(what.into());
        bar.enable_steady_tick(Duration::from_millis(120));
        Self(bar)
    }

    /// Work that is done when `total` bytes are.
    pub fn bytes(what: impl Into<String>, total: Bytes) -> Self {
        let bar = ProgressBar::new(total.0);
        let template = "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {eta}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(what.into());
        Self(bar)
    }

    /// Tells what is being done.
    pub fn say(&self, what: String) {
        self.0.set_message(what);
    }

    /// Tells what is waited for, and how long at most, in a line of standard error that stays there.
    pub fn note(&self, text: &str) {
        if self.0.is_hidden() { eprintln!("{text}") } else { self.0.println(text) }
    }

    /// Tells how much is done, and of how much: the total may turn out to be another.
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
