//! What this host can do for Aquifer and what is missing: one [`Check`] a thing, each with the reason and the way out.

pub mod agent;
mod devices;
mod host;
mod memory;
mod nvme;

use serde::Serialize;

/// How good a thing is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// It works, less well or less safely than it could.
    Warn,
    /// Not there.
    Missing,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// The thing.
    pub name: String,
    /// How good it is.
    pub verdict: Verdict,
    /// Whether Aquifer cannot do its work without it.
    pub essential: bool,
    /// What was found: the reason for the verdict.
    pub found: String,
    /// What to do about it.
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

/// All that was looked at.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Whether Aquifer can do its work here: nothing essential is missing.
    pub able: bool,
    /// The checks, in the order in which a person fixes things.
    pub checks: Vec<Check>,
}

impl Report {
    /// Looks at this host. Changes nothing on it.
    pub fn make() -> Self {
        Self::of([host::checks(), memory::checks(), devices::checks(), nvme::checks()].concat())
    }

    /// What such checks come to.
    pub fn of(checks: Vec<Check>) -> Self {
        let able = !checks.iter().any(|check| check.essential && check.verdict == Verdict::Missing);
        Self { able, checks }
    }
}

/// The text of a file under /proc or /sys, trimmed; `None` where it cannot be read.
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
    fn what_is_not_ok_says_what_to_do() {
        for check in Report::make().checks {
            assert_eq!(check.verdict == Verdict::Ok, check.help.is_none(), "{check:?}");
            assert!(!check.found.is_empty(), "{check:?}");
        }
    }
}
