//! The checks of this host for Aquifer: one [`Check`] a feature, with the reason and a remedy.

pub mod agent;
mod damon;
mod devices;
mod host;
mod keys;
mod memory;
mod network;
mod nvme;
mod qemu;

use std::path::Path;

use aquifer_agent::config::Config;
use serde::Serialize;

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The feature works as it should.
    Ok,
    /// The feature works, but less well or less safely than it could.
    Warn,
    /// The feature is missing.
    Missing,
}

/// The check of one feature.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// The feature's name.
    pub name: String,
    /// The result.
    pub verdict: Verdict,
    /// Whether Aquifer cannot do its work without the feature.
    pub essential: bool,
    /// The finding: the reason for the result.
    pub found: String,
    /// The remedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub help: Option<String>,
}

impl Check {
    fn new(name: impl Into<String>, verdict: Verdict, found: impl Into<String>) -> Self {
        Self { name: name.into(), verdict, essential: false, found: found.into(), help: None }
    }

    fn ok(name: impl Into<String>, found: impl Into<String>) -> Self {
        Self::new(name, Verdict::Ok, found)
    }

    fn warn(name: impl Into<String>, found: impl Into<String>, help: impl Into<String>) -> Self {
        Self { help: Some(help.into()), ..Self::new(name, Verdict::Warn, found) }
    }

    fn missing(name: impl Into<String>, found: impl Into<String>, help: impl Into<String>) -> Self {
        Self { help: Some(help.into()), ..Self::new(name, Verdict::Missing, found) }
    }

    fn essential(mut self) -> Self {
        self.essential = true;
        self
    }
}

/// The checks of a host or of a configuration.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Whether Aquifer can do its work here: nothing essential is missing.
    pub able: bool,
    /// The checks, in the order in which a person repairs things.
    pub checks: Vec<Check>,
}

impl Report {
    /// Checks this host, with its certificate if this configuration names one. Changes nothing.
    pub fn make(config: &Path) -> Self {
        let mut checks =
            [host::checks(), memory::checks(), devices::checks(), nvme::checks()].concat();
        checks.extend([network::check(), damon::check(Path::new("/sys")), qemu::check()]);
        let config = Config::load(config).ok();
        checks.extend(config.as_ref().and_then(agent::certificate_if_any));
        checks.extend(config.as_ref().and_then(keys::check));
        Self::of(checks)
    }

    /// Makes the report of these checks.
    pub fn of(checks: Vec<Check>) -> Self {
        let able = !checks.iter().any(|check| check.essential && check.verdict == Verdict::Missing);
        Self { able, checks }
    }
}

/// Returns the trimmed text of a file under /proc or /sys; `None` if it cannot be read.
fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_essential_makes_a_host_unable() {
        let lame = Check::missing("psi", "no", "boot with psi=1");
        assert!(Report::of(vec![lame.clone(), Check::ok("root", "yes").essential()]).able);
        assert!(!Report::of(vec![lame.essential()]).able);
    }

    #[test]
    fn a_check_that_is_not_ok_has_a_remedy() {
        for check in Report::make(Path::new("/nowhere")).checks {
            assert_eq!(check.verdict == Verdict::Ok, check.help.is_none(), "{check:?}");
            assert!(!check.found.is_empty(), "{check:?}");
        }
    }
}
