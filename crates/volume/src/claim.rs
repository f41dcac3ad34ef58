//! The claim of an owner on a lease's pages, and the incarnation of those pages.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use aquifer_page::visitor::Visitor;
use aquifer_page::{ClientId, Incarnation, OwnerId};
use serde::{Deserialize, Serialize};

use crate::lock;

/// The identity that a borrower tells its lender, and the incarnation that it expects there. The
/// claim is part of the lease's record, so the next process of the volume says and expects the
/// same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// The owner of the lease's pages. It stays the same for as long as the pages do.
    pub owner: OwnerId,
    /// The owner's name for operators. Errors of other owners show it.
    pub name: String,
    /// The number of times that the owner has moved to another host.
    #[serde(default)]
    pub generation: u32,
    /// Whether the claim outlives the processes of this host.
    #[serde(default)]
    pub keeps: bool,
    /// The incarnation of the lease's pages, once known. A lender with another incarnation has lost
    /// the pages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incarnation: Option<Incarnation>,
}

impl Claim {
    /// Makes the claim of a new owner.
    pub fn new(name: String, keeps: bool) -> Self {
        Self { owner: OwnerId::random(), name, generation: 0, keeps, incarnation: None }
    }
}

/// Returns the id of this process: one for all lenders, for the lifetime of the process.
fn this_client() -> ClientId {
    static CLIENT: OnceLock<ClientId> = OnceLock::new();
    *CLIENT.get_or_init(ClientId::random)
}

/// A claim in use, and the state that its connections share.
#[derive(Debug)]
pub(crate) struct Identity {
    claim: Claim,
    takes_over: bool,
    /// See [`Identity::end_older`].
    ends_older: AtomicBool,
    /// Grows when a connection breaks, so that the lender ends the connections of older epochs.
    epoch: AtomicU64,
    incarnation: Mutex<Option<Incarnation>>,
}

impl Identity {
    pub(crate) fn new(claim: Claim, takes_over: bool) -> Self {
        // The clock makes later processes, and later volumes of one process, start at a higher
        // epoch. A lender recognizes a new process by its random client id.
        let now =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let (epoch, incarnation) =
            (AtomicU64::new(now.as_nanos() as u64), Mutex::new(claim.incarnation));
        Self { claim, takes_over, ends_older: AtomicBool::new(false), epoch, incarnation }
    }

    pub(crate) fn visitor(&self) -> Visitor {
        let Claim { owner, generation, keeps, .. } = self.claim;
        Visitor {
            owner,
            name: self.claim.name.clone(),
            generation,
            ends_older: self.ends_older.load(Ordering::SeqCst),
            client: this_client(),
            epoch: self.epoch(),
            keeps,
            takes_over: self.takes_over,
        }
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    /// Makes the lender end the owner's clients of earlier generations before it serves anything
    /// more. The caller calls this once the owner has moved here for good. The new epoch makes
    /// workers connect again, and so tell the lender.
    pub(crate) fn end_older(&self) {
        self.ends_older.store(true, Ordering::SeqCst);
        self.epoch.fetch_add(1, Ordering::SeqCst);
    }

    /// Starts a new epoch, because a connection of this one has broken.
    pub(crate) fn broke(&self, epoch: u64) {
        // A failure means that another thread has started a new epoch already.
        let _ = self.epoch.compare_exchange(epoch, epoch + 1, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Returns the incarnation of the lease's pages, if it is known.
    pub(crate) fn incarnation(&self) -> Option<Incarnation> {
        *lock(&self.incarnation)
    }

    /// Checks that the lender has the incarnation that it had first, and records the first one. The
    /// error is the expected incarnation.
    pub(crate) fn check(&self, found: Option<Incarnation>) -> Result<(), Incarnation> {
        let mut expected = lock(&self.incarnation);
        match *expected {
            Some(expected) if found != Some(expected) => Err(expected),
            _ => {
                *expected = found;
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lender_is_held_to_what_it_was_at_first() {
        let identity = Identity::new(Claim::new("volume 1".to_owned(), false), false);
        assert_eq!(identity.check(None), Ok(()), "of another make");
        assert_eq!(identity.check(Some(Incarnation(1))), Ok(()));
        assert_eq!(identity.check(Some(Incarnation(2))), Err(Incarnation(1)));
        assert_eq!(identity.check(None), Err(Incarnation(1)), "it has forgotten how to tell");
        assert_eq!(identity.check(Some(Incarnation(1))), Ok(()));
    }

    #[test]
    fn an_epoch_ends_once() {
        let identity = Identity::new(Claim::new("volume 1".to_owned(), false), false);
        let first = identity.epoch();
        identity.broke(first);
        identity.broke(first);
        assert_eq!(identity.epoch(), first + 1);
    }
}
