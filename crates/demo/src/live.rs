//! The view of a running demo on a terminal: one line for each host, and one for the current stage.
//!
//! In a pipe it shows nothing.

use aquifer_page::Bytes;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use super::picture::Sample;

/// The lines on the terminal; their drop clears them.
#[derive(Debug)]
pub struct Live {
    lines: MultiProgress,
    stage: ProgressBar,
    hosts: Vec<ProgressBar>,
}

impl Live {
    /// Shows a line for each host, given by its name and RAM, and above them a line for the stage.
    pub fn new(hosts: &[(&str, Bytes)]) -> Self {
        // indicatif draws on standard error, and only if that is a terminal.
        let lines = MultiProgress::new();
        let stage = lines.add(ProgressBar::new(0).with_style(style("{elapsed:>4}  {wide_msg}")));
        let host = |(name, ram): &(&str, Bytes)| {
            let bar = ProgressBar::new(ram.0).with_prefix((*name).to_owned());
            lines
                .add(bar.with_style(style("      {prefix:8} RAM {bar:32.blue/black.bright} {msg}")))
        };
        let hosts = hosts.iter().map(host).collect();
        Self { lines, stage, hosts }
    }

    /// Shows the stage that begins.
    pub fn stage(&self, what: &str) {
        self.stage.set_message(what.to_owned());
        self.stage.tick();
    }

    /// Shows a reading of a host; `host` is its index in the argument of [`Live::new`].
    pub fn show(&self, host: usize, sample: &Sample) {
        if let Some(line) = self.hosts.get(host) {
            line.set_position(sample.ram.0);
            line.set_message(describe(sample, line.length().map_or(Bytes::ZERO, Bytes)));
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        // Lines left on a broken terminal are no reason to fail.
        let _ = self.lines.clear();
    }
}

fn describe(sample: &Sample, ram: Bytes) -> String {
    let used = format!("{} of {ram}", sample.ram);
    format!("{used:20} swap {:9} lent {:9} {}", sample.swap, sample.lent, sample.role)
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

#[cfg(test)]
mod tests {
    use aquifer_api::status::Role;

    use super::*;

    #[test]
    fn a_line_tells_ram_swap_lent_and_role_in_columns() {
        let sample =
            |swap, role| Sample { at: 0.0, ram: Bytes::mib(213), swap, lent: Bytes::ZERO, role };
        let short = describe(&sample(Bytes::ZERO, Role::Neutral), Bytes::mib(256));
        let long =
            describe(&sample(Bytes(Bytes::mib(128).0 + 4096), Role::Borrower), Bytes::mib(256));
        assert_eq!(short.find("lent"), long.find("lent"));
        assert!(long.ends_with("borrower") && long.contains("213MiB of 256MiB"), "{long}");
    }

    #[test]
    fn nothing_is_written_where_nobody_watches() {
        let live = Live::new(&[("a", Bytes::mib(1))]);
        live.stage("x");
        live.show(
            7,
            &Sample { at: 0.0, ram: Bytes(1), swap: Bytes(1), lent: Bytes(1), role: Role::Neutral },
        );
    }
}
