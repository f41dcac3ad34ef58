//! The source of connections to a lease, and the identity that they present.

use std::fmt;
use std::time::Duration;

use aquifer_page::Incarnation;
use aquifer_transport::initiator::{Connector, Initiator, InitiatorError};

use crate::claim::{Claim, Identity};

/// The source of connections to a lease.
pub struct Source {
    connector: Box<dyn Connector>,
    identity: Option<Identity>,
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.connector.fmt(f)
    }
}

impl Source {
    /// Makes a source of connections without an identity.
    pub fn new(connector: impl Connector + 'static) -> Self {
        Self { connector: Box::new(connector), identity: None }
    }

    /// Adds the identity that connections present to the lender.
    #[must_use]
    pub fn claimed(self, claim: Claim, takes_over: bool) -> Self {
        Self { identity: Some(Identity::new(claim, takes_over)), ..self }
    }

    /// Connects, and checks that the lender still has the incarnation that it had first.
    pub(super) fn connect(
        &self,
        io_timeout: Duration,
    ) -> Result<Box<dyn Initiator>, InitiatorError> {
        let visitor = self.identity.as_ref().map(Identity::visitor);
        let link = self.connector.connect(visitor.as_ref(), io_timeout)?;
        let found = link.incarnation();
        match self.identity.as_ref().map_or(Ok(()), |identity| identity.check(found)) {
            Ok(()) => Ok(link),
            Err(expected) => Err(InitiatorError::forgot(&self.connector, expected, found)),
        }
    }

    /// Returns the current epoch. Connections of any other epoch are of no further use.
    pub(super) fn epoch(&self) -> u64 {
        self.identity.as_ref().map_or(0, Identity::epoch)
    }

    /// Ends all connections of this epoch, because one of them has broken and its requests may
    /// still arrive.
    pub(super) fn broke(&self, epoch: u64) {
        self.identity.iter().for_each(|identity| identity.broke(epoch));
    }

    /// Records that the owner has moved here for good: see [`Identity::end_older`].
    pub(super) fn end_older(&self) {
        self.identity.iter().for_each(Identity::end_older);
    }

    /// Returns the incarnation of the pages there, if it is known.
    pub(super) fn incarnation(&self) -> Option<Incarnation> {
        self.identity.as_ref().and_then(Identity::incarnation)
    }

    /// Returns the error for a connection that failed earlier, if no new attempt is made.
    pub(super) fn broken(&self) -> InitiatorError {
        InitiatorError::broken(&self.connector)
    }
}
