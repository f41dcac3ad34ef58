//! Whose pages a lease holds, and which life of the lease it is that holds them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use aquifer_fabric::Visitor;
use aquifer_page::{ClientId, Incarnation, OwnerId};
use serde::{Deserialize, Serialize};

use crate::lock;

/// What a lender is told of who uses its lease, and what it must prove of itself: part of the lease's record, so that the
/// process that takes the volume up next says and expects the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// Whose pages the lease holds. It stays the same for as long as they do.
    pub owner: OwnerId,
    /// What operators call the owner, for the errors of others.
    pub name: String,
    /// How often the owner has moved to another host.
    #[serde(default)]
    pub generation: u32,
    /// Whether the claim outlives this host's processes.
    #[serde(default)]
    pub keeps: bool,
    /// The life of the lease's pages, once it is known. A lender that has another has lost them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incarnation: Option<Incarnation>,
}

impl Claim {
    /// One of an owner that there has not been yet.
    pub fn new(name: String, keeps: bool) -> Self {
        Self { owner: OwnerId::random(), name, generation: 0, keeps, incarnation: None }
    }
}

/// This process, for all lenders and as long as it lives.
fn this_client() -> ClientId {
    static CLIENT: OnceLock<ClientId> = OnceLock::new();
    *CLIENT.get_or_init(ClientId::random)
}

/// A claim in use: what every connection says and is held to.
#[derive(Debug)]
pub(crate) struct Identity {
    claim: Claim,
    takes_over: bool,
    /// See [`Identity::end_older`].
    ends_older: AtomicBool,
    /// Grows when a connection breaks, so that the lender ends those of before.
    epoch: AtomicU64,
    incarnation: Mutex<Option<Incarnation>>,
}

impl Identity {
    pub(crate) fn new(claim: Claim, takes_over: bool) -> Self {
        // The clock has later processes, and later volumes of one process, begin above earlier ones; a process that is
        // new to the lender is known by its own random number.
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

    /// The owner has moved here for good: whatever is asked of the lender from now on, it ends the clients of earlier
    /// generations before. Connections of a new epoch tell it so.
    pub(crate) fn end_older(&self) {
        self.ends_older.store(true, Ordering::SeqCst);
        self.epoch.fetch_add(1, Ordering::SeqCst);
    }

    /// A connection of this epoch has broken: those that follow belong to another.
    pub(crate) fn broke(&self, epoch: u64) {
        // Where it is another already, somebody else found the same.
        let _ = self.epoch.compare_exchange(epoch, epoch + 1, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// The life of the lease's pages, as far as it is known.
    pub(crate) fn incarnation(&self) -> Option<Incarnation> {
        *lock(&self.incarnation)
    }

    /// Holds a lender to what it was when it was first seen; says what it should have been where it is not.
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
