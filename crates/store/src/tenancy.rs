//! Who may be connected to a lease: one owner at a time, and of each of its processes the newest connections only.
//!
//! A client numbers its connections by an epoch, and raises that when one of them breaks. Before a connection of a newer
//! epoch is let in, those of older ones are ended and waited for: no write that came over them can follow a newer one.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aquifer_page::{ClientId, OwnerId};
use serde::{Deserialize, Serialize};

/// How long the end of older connections is waited for. They only finish requests that have arrived.
const LONGEST_END: Duration = Duration::from_secs(10);
/// How long a lease's present owner may take to leave before the next one is refused: whoever has just let go of it has
/// connections that the server has yet to see the end of.
const GRACE: Duration = Duration::from_secs(1);
/// Clients and owners of the past that are remembered.
const PAST: usize = 64;

/// Who wants to be connected to a lease, as it says itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visitor {
    /// Whose pages the lease holds, or is to hold.
    pub owner: OwnerId,
    /// What operators call the owner.
    pub name: String,
    /// How often the owner has moved to another host. One client of each generation can be connected.
    pub generation: u32,
    /// The process.
    pub client: ClientId,
    /// Grows when a connection of the client breaks.
    pub epoch: u64,
    /// Whether the claim outlives the connections, for as long as the lease stores anything.
    pub keeps: bool,
    /// Whether to take the lease from its present owner, whose pages are lost then.
    pub takes_over: bool,
}

/// The owner of a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The owner.
    pub owner: OwnerId,
    /// What operators call it.
    pub name: String,
}

/// Why a visitor is not let in.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// The lease is another owner's.
    #[error("it belongs to {0}: use another export, remove that one first, or take it over by force")]
    Claimed(String),
    /// A newer connection or process of the same owner has taken over.
    #[error("a newer connection of {0} has taken over")]
    Late(String),
    /// Connections of before did not end.
    #[error("older connections of {0} have not ended yet")]
    Busy(String),
    /// The claim could not be kept.
    #[error("the claim cannot be recorded: {0}")]
    Unrecorded(String),
}

/// Ends a connection: whoever serves it wakes up and leaves.
pub type End = Box<dyn Fn() + Send + Sync>;

struct Guest {
    owner: OwnerId,
    generation: u32,
    client: ClientId,
    epoch: u64,
    end: End,
}

/// Who is connected to one lease.
#[derive(Default)]
pub(crate) struct Tenancy {
    book: Mutex<Book>,
    /// Rung when a guest has left.
    left: Condvar,
}

#[derive(Default)]
struct Book {
    claim: Option<(Claim, bool)>,
    guests: BTreeMap<u64, Guest>,
    next: u64,
    /// The newest client of each generation of the present owner, and its epoch.
    newest: BTreeMap<u32, (ClientId, u64)>,
    past: VecDeque<(OwnerId, ClientId)>,
    /// Owners whose pages others may have overwritten since: they are not let in again.
    ousted: VecDeque<OwnerId>,
}

/// A visitor's time with a lease, over when dropped.
pub struct Stay {
    tenancy: Arc<Tenancy>,
    id: u64,
}

impl fmt::Debug for Tenancy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let book = self.locked();
        f.debug_struct("Tenancy").field("claim", &book.claim).field("guests", &book.guests.len()).finish()
    }
}

impl fmt::Debug for Stay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stay").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        self.tenancy.locked().guests.remove(&self.id);
        self.tenancy.left.notify_all();
    }
}

impl Tenancy {
    /// That of a lease of which this is on record.
    pub(crate) fn new(claim: Option<Claim>) -> Arc<Self> {
        let book = Book { claim: claim.map(|claim| (claim, true)), ..Book::default() };
        Arc::new(Self { book: Mutex::new(book), left: Condvar::new() })
    }

    /// Lets a visitor in when all that must end for it has ended. `record` is told of a claim that is to outlive this process.
    pub(crate) fn admit(
        self: &Arc<Self>,
        visitor: &Visitor,
        is_empty: impl Fn() -> bool,
        record: impl Fn(Option<&Claim>) -> Result<(), String>,
        end: End,
    ) -> Result<Stay, Denied> {
        let started = Instant::now();
        let mut book = self.locked();
        loop {
            let (longest, denied) = match book.make_way(visitor, &is_empty) {
                Ok(leaving) if leaving.is_empty() => break,
                Ok(leaving) => {
                    leaving.iter().for_each(|id| (book.guests[id].end)());
                    (LONGEST_END, Denied::Busy(visitor.name.clone()))
                }
                Err(denied @ Denied::Claimed(_)) if !book.guests.is_empty() => (GRACE, denied),
                Err(denied) => return Err(denied),
            };
            let left = longest.saturating_sub(started.elapsed());
            if left.is_zero() {
                return Err(denied);
            }
            (book, _) = self.left.wait_timeout(book, left).unwrap_or_else(PoisonError::into_inner);
        }
        let claim = Claim { owner: visitor.owner, name: visitor.name.clone() };
        if book.claim.as_ref() != Some(&(claim.clone(), visitor.keeps)) {
            record(visitor.keeps.then_some(&claim)).map_err(Denied::Unrecorded)?;
            book.claim = Some((claim, visitor.keeps));
        }
        book.next += 1;
        let id = book.next;
        let Visitor { owner, generation, client, epoch, .. } = *visitor;
        book.guests.insert(id, Guest { owner, generation, client, epoch, end });
        Ok(Stay { tenancy: Arc::clone(self), id })
    }

    fn locked(&self) -> MutexGuard<'_, Book> {
        // Guests come and go whole, so a panic elsewhere cannot have left the book half written.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book {
    /// Says which guests must leave before the visitor can come in; from now on none that is older comes in.
    fn make_way(&mut self, visitor: &Visitor, is_empty: impl Fn() -> bool) -> Result<Vec<u64>, Denied> {
        let Visitor { owner, generation, client, epoch, .. } = *visitor;
        if self.ousted.contains(&owner) {
            let present = self.claim.as_ref().map(|(claim, _)| claim.name.clone()).unwrap_or_default();
            return Err(Denied::Claimed(present));
        }
        if let Some((claim, keeps)) = self.claim.as_ref().filter(|(claim, _)| claim.owner != owner) {
            let has_guests = self.guests.values().any(|guest| guest.owner == claim.owner);
            if (has_guests || (*keeps && !is_empty())) && !visitor.takes_over {
                return Err(Denied::Claimed(claim.name.clone()));
            }
            if has_guests {
                return Ok(self.guests_that(|guest| guest.owner != owner));
            }
            let before = claim.owner;
            if !is_empty() {
                remember(&mut self.ousted, before);
            }
            for (_, (client, _)) in std::mem::take(&mut self.newest) {
                remember(&mut self.past, (before, client));
            }
        }
        let newest = self.newest.get(&generation).copied();
        if self.past.contains(&(owner, client))
            || newest.is_some_and(|(known, at)| known == client && at > epoch)
        {
            return Err(Denied::Late(visitor.name.clone()));
        }
        if let Some((known, _)) = newest.filter(|(known, _)| *known != client) {
            remember(&mut self.past, (owner, known));
        }
        self.newest.insert(generation, (client, epoch));
        Ok(self.guests_that(|guest| {
            guest.generation == generation && (guest.client != client || guest.epoch < epoch)
        }))
    }

    fn guests_that(&self, which: impl Fn(&Guest) -> bool) -> Vec<u64> {
        self.guests.iter().filter(|(_, guest)| which(guest)).map(|(id, _)| *id).collect()
    }
}

fn remember<T>(past: &mut VecDeque<T>, one: T) {
    past.truncate(PAST - 1);
    past.push_front(one);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;

    fn visitor(owner: u128, client: u128, epoch: u64) -> Visitor {
        let (owner, client, name) = (OwnerId(owner), ClientId(client), format!("owner {owner}"));
        Visitor { owner, name, generation: 0, client, epoch, keeps: false, takes_over: false }
    }

    fn admit(tenancy: &Arc<Tenancy>, visitor: &Visitor) -> Result<Stay, Denied> {
        tenancy.admit(visitor, || false, |_| Ok(()), Box::new(|| {}))
    }

    #[test]
    fn a_second_owner_is_refused_by_name_until_the_first_has_gone() {
        let tenancy = Tenancy::new(None);
        let first = admit(&tenancy, &visitor(1, 1, 1)).unwrap();
        let refused = admit(&tenancy, &visitor(2, 2, 1)).unwrap_err();
        assert_eq!(refused, Denied::Claimed("owner 1".to_owned()));
        drop(first);
        let kept = Visitor { keeps: true, ..visitor(2, 2, 1) };
        drop(admit(&tenancy, &kept).unwrap());
        assert_eq!(admit(&tenancy, &visitor(1, 1, 1)).unwrap_err(), Denied::Claimed("owner 2".to_owned()));
        drop(admit(&tenancy, &Visitor { takes_over: true, ..visitor(3, 3, 1) }).unwrap());
        assert_eq!(
            admit(&tenancy, &kept).unwrap_err(),
            Denied::Claimed("owner 3".to_owned()),
            "its pages are gone"
        );
    }

    #[test]
    fn a_kept_claim_on_nothing_stands_in_nobodys_way() {
        let claim = Claim { owner: OwnerId(1), name: "owner 1".to_owned() };
        let tenancy = Tenancy::new(Some(claim));
        assert!(admit(&tenancy, &visitor(2, 2, 1)).is_err());
        tenancy.admit(&visitor(2, 2, 1), || true, |_| Ok(()), Box::new(|| {})).unwrap();
    }

    #[test]
    fn a_newer_epoch_waits_for_older_connections_to_end() {
        let tenancy = Tenancy::new(None);
        let told = Arc::new(AtomicBool::new(false));
        let heard = Arc::clone(&told);
        let end: End = Box::new(move || heard.store(true, Ordering::SeqCst));
        let old = tenancy.admit(&visitor(1, 1, 1), || true, |_| Ok(()), end).unwrap();
        let beside = admit(&tenancy, &visitor(1, 1, 1)).unwrap();
        let newer = thread::spawn({
            let tenancy = Arc::clone(&tenancy);
            move || admit(&tenancy, &visitor(1, 1, 2))
        });
        while !told.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        assert!(!newer.is_finished());
        assert_eq!(admit(&tenancy, &visitor(1, 1, 1)).unwrap_err(), Denied::Late("owner 1".to_owned()));
        drop(old);
        drop(beside);
        newer.join().unwrap().unwrap();
    }

    #[test]
    fn a_new_process_ends_the_one_before_and_another_generation_does_not() {
        let tenancy = Tenancy::new(None);
        let moving = admit(&tenancy, &Visitor { generation: 1, ..visitor(1, 9, 1) }).unwrap();
        drop(admit(&tenancy, &visitor(1, 1, 7)).unwrap());
        drop(admit(&tenancy, &visitor(1, 2, 1)).unwrap());
        assert_eq!(admit(&tenancy, &visitor(1, 1, 8)).unwrap_err(), Denied::Late("owner 1".to_owned()));
        drop(moving);
    }
}
