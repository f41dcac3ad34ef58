//! The failure of a command: what failed, why, and the remedy.

use std::error::Error;
use std::fmt;
use std::io;

use serde::Serialize;

/// The result of a command or of one of its steps.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

/// A failed command, in the operator's words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// The activity of the command, as a phrase: "attaching nbd://10.0.0.2:10809/".
    pub what: String,
    /// The reason for the failure.
    pub why: String,
    /// The remedy, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub help: Option<String>,
}

/// Whether a command ends with a failure.
#[derive(Clone, Copy)]
enum Kind {
    /// It ends.
    Error,
    /// It goes on.
    Warning,
}

impl Failure {
    /// Makes a failure without a remedy.
    pub fn new(what: impl Into<String>, why: impl fmt::Display) -> Self {
        Self { what: what.into(), why: why.to_string(), help: None }
    }

    /// Adds a remedy to the failure.
    #[must_use]
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// Adds a remedy to a failure that has none.
    #[must_use]
    pub fn or_help(mut self, help: impl Into<String>) -> Self {
        self.help.get_or_insert_with(|| help.into());
        self
    }

    /// Writes the failure to standard error: text for a person, or one JSON object `{"error":
    /// {…}}`.
    pub fn report(&self, json: bool) {
        eprintln!("{}", self.line(Kind::Error, json));
    }

    /// Writes the failure to standard error as a warning: the command goes on. With `json` it is
    /// one object `{"warning": {…}}`.
    pub fn warn(&self, json: bool) {
        eprintln!("{}", self.line(Kind::Warning, json));
    }

    fn line(&self, kind: Kind, json: bool) -> String {
        match (json, kind) {
            (true, Kind::Error) => serde_json::json!({ "error": self }).to_string(),
            (true, Kind::Warning) => serde_json::json!({ "warning": self }).to_string(),
            (false, Kind::Error) => format!("aquifer: {self}"),
            (false, Kind::Warning) => format!("aquifer: warning: {self}"),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.why)?;
        match &self.help {
            Some(help) => write!(f, "\n  help: {help}"),
            None => Ok(()),
        }
    }
}

impl Error for Failure {}

/// Turns any error into a [`Failure`] by adding the activity that failed.
pub trait OrFail<T> {
    /// Makes a failure of the activity `what`; its reason is the error with all its causes.
    fn or_fail<W: Into<String>>(self, what: impl FnOnce() -> W) -> Result<T>;
}

impl<T, E: Error + 'static> OrFail<T> for Result<T, E> {
    fn or_fail<W: Into<String>>(self, what: impl FnOnce() -> W) -> Result<T> {
        self.map_err(|error| {
            let failure = Failure::new(what(), causes(&error));
            let lacks_root = is_denied(&error) && !rustix::process::geteuid().is_root();
            if lacks_root { failure.help("run as root") } else { failure }
        })
    }
}

/// Returns whether the kernel refused for lack of rights.
pub fn is_denied(error: &(dyn Error + 'static)) -> bool {
    let denied = |error: &io::Error| error.kind() == io::ErrorKind::PermissionDenied;
    error.downcast_ref().is_some_and(denied) || error.source().is_some_and(is_denied)
}

/// Returns an error and its causes on one line, without causes that the text already has.
fn causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_reads_as_what_why_and_what_to_do() {
        let failure = Failure::new("reading /etc/x", "no such file")
            .help("make it with 'aquifer cluster create'");
        assert_eq!(
            failure.to_string(),
            "reading /etc/x: no such file\n  help: make it with 'aquifer cluster create'"
        );
    }

    #[test]
    fn a_warning_differs_from_a_failure_in_its_first_word() {
        let failure = Failure::new("reading /etc/x", "no such file");
        assert_eq!(failure.line(Kind::Error, false), "aquifer: reading /etc/x: no such file");
        assert_eq!(
            failure.line(Kind::Warning, false),
            "aquifer: warning: reading /etc/x: no such file"
        );
        for (kind, key) in [(Kind::Error, "error"), (Kind::Warning, "warning")] {
            let object: serde_json::Value =
                serde_json::from_str(&failure.line(kind, true)).unwrap();
            assert_eq!(object[key]["why"], "no such file", "{object}");
        }
    }

    #[test]
    fn every_cause_is_told_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("outer")]
        struct Outer(#[source] fmt::Error);

        let failure = Err::<(), _>(Outer(fmt::Error)).or_fail(|| "doing").unwrap_err();
        assert_eq!(failure.why, format!("outer: {}", fmt::Error));
    }
}
