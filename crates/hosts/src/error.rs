//! The failure of a step with hosts: what failed, why, and the remedy.

use std::fmt::Display;

/// The result of a step with hosts.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed step.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {why}")]
pub struct Error {
    /// The activity, as a phrase.
    pub what: String,
    /// The reason.
    pub why: String,
    /// The remedy, if there is one.
    pub help: Option<&'static str>,
}

impl Error {
    /// Makes an error without a remedy.
    pub fn new(what: impl Into<String>, why: impl Display) -> Self {
        Self { what: what.into(), why: why.to_string(), help: None }
    }
}

/// Turns any error into an [`Error`] by adding the activity that failed.
pub(crate) trait During<T> {
    fn during<W: Into<String>>(self, what: impl FnOnce() -> W) -> Result<T>;
}

impl<T, E: Display> During<T> for Result<T, E> {
    fn during<W: Into<String>>(self, what: impl FnOnce() -> W) -> Result<T> {
        self.map_err(|error| Error::new(what(), error))
    }
}
