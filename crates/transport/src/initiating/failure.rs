//! What failures of all protocols have in common.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use super::Interrupted;
use crate::initiator::{InitiatorError, Outcome};

/// A protocol's failure.
pub trait Failure: Error + From<Interrupted> + Send + Sync + 'static {
    /// The failure of each use of a connection that an earlier failure ended.
    const BROKEN: Self;

    /// Makes the failure of a peer that violates the protocol.
    fn protocol(what: impl Into<String>) -> Self;

    /// Returns what follows from the failure.
    fn outcome(&self) -> Outcome;

    /// Returns whether the connection is of no further use. A new one may work.
    fn ends_connection(&self) -> bool {
        self.outcome().ends_connection()
    }
}

/// A failure, with the target that it concerns.
#[derive(Debug, thiserror::Error)]
#[error("{target}: {failure}")]
pub struct Failed<T: fmt::Debug + fmt::Display, F: Failure> {
    /// The target, as the caller addressed it.
    pub target: Arc<T>,
    /// The cause.
    #[source]
    pub failure: F,
}

impl<T: fmt::Debug + fmt::Display, F: Failure> Failed<T, F> {
    /// Adds the target to a failure.
    pub fn new(target: &Arc<T>, failure: F) -> Self {
        Self { target: Arc::clone(target), failure }
    }

    /// Returns whether the failure ended the connection; the caller can still connect anew.
    pub fn ends_connection(&self) -> bool {
        self.failure.ends_connection()
    }

    /// Returns whether the lender has no space left for the written data.
    pub fn is_no_space(&self) -> bool {
        self.failure.outcome() == Outcome::NoSpace
    }
}

impl<T: fmt::Debug + fmt::Display, F: Failure> From<Failed<T, F>> for InitiatorError {
    fn from(error: Failed<T, F>) -> Self {
        Self::new(&error.target, error.failure.outcome(), error.failure)
    }
}
