//! Admission to a lease: one owner at a time, and only the newest connections of each of its
//! processes.
//!
//! A client numbers its connections by an epoch, and raises the epoch when a connection breaks.
//! Before the lease admits a connection of a newer epoch, it ends those of older epochs and waits
//! for them. So no write of an older connection can follow a write of a newer one.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aquifer_page::visitor::{Denied, End, Visitor};
use aquifer_page::{ClientId, OwnerId, lock};
use serde::{Deserialize, Serialize};

/// Timeout for the end of older connections. They only finish requests that have arrived.
const LONGEST_END: Duration = Duration::from_secs(10);
/// How long a new owner waits for the present one to leave before it is refused. The server may not
/// yet have seen the end of connections that the owner has closed.
const GRACE: Duration = Duration::from_secs(1);
/// Former clients and owners to remember.
const PAST: usize = 64;

/// The owner of a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The owner.
    pub owner: OwnerId,
    /// The owner's name for operators.
    pub name: String,
    /// The owner's lowest admitted generation.
    #[serde(default)]
    pub from_generation: u32,
}

/// The state that outlives all connections and the process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TenancyRecord {
    /// The owner, if its claim outlives its connections.
    pub(crate) claim: Option<Claim>,
    /// Owners whose pages another owner may have overwritten; they are not admitted again.
    pub(crate) ousted: Vec<OwnerId>,
}

struct Guest {
    owner: OwnerId,
    generation: u32,
    client: ClientId,
    epoch: u64,
    end: End,
}

/// The connections of one lease.
#[derive(Default)]
pub(crate) struct Tenancy {
    book: Mutex<Book>,
    /// Notified when a guest leaves.
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
    /// See [`TenancyRecord`].
    ousted: VecDeque<OwnerId>,
    /// The present owner's lowest admitted generation.
    from_generation: u32,
}

/// A visitor's connection to a lease; it ends when dropped.
pub struct Stay {
    tenancy: Arc<Tenancy>,
    id: u64,
}

impl fmt::Debug for Tenancy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let book = self.locked();
        f.debug_struct("Tenancy")
            .field("claim", &book.claim)
            .field("guests", &book.guests.len())
            .finish()
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
    /// Makes the tenancy of a lease with this recorded state.
    pub(crate) fn new(recorded: TenancyRecord) -> Arc<Self> {
        let from_generation = recorded.claim.as_ref().map_or(0, |claim| claim.from_generation);
        let claim = recorded.claim.map(|claim| (claim, true));
        let book =
            Book { claim, ousted: recorded.ousted.into(), from_generation, ..Book::default() };
        Arc::new(Self { book: Mutex::new(book), left: Condvar::new() })
    }

    /// Admits a visitor once all connections that it replaces have ended. `record` saves the state
    /// that outlives this process.
    pub(crate) fn admit(
        self: &Arc<Self>,
        visitor: &Visitor,
        is_empty: impl Fn() -> bool,
        record: impl Fn(TenancyRecord) -> Result<(), String>,
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
        let Visitor { owner, generation, client, epoch, keeps, .. } = *visitor;
        let claim =
            Claim { owner, name: visitor.name.clone(), from_generation: book.from_generation };
        let ousted = book.ousted.iter().copied().collect();
        record(TenancyRecord { claim: keeps.then(|| claim.clone()), ousted })
            .map_err(Denied::Unrecorded)?;
        book.claim = Some((claim, keeps));
        book.next += 1;
        let id = book.next;
        book.guests.insert(id, Guest { owner, generation, client, epoch, end });
        Ok(Stay { tenancy: Arc::clone(self), id })
    }

    fn locked(&self) -> MutexGuard<'_, Book> {
        // Guests are inserted and removed whole, so a panic in another thread cannot leave the book
        // half written.
        lock(&self.book)
    }
}

impl Book {
    /// Returns the guests that must leave before the visitor can enter; blocks older ones from here
    /// on.
    fn make_way(
        &mut self,
        visitor: &Visitor,
        is_empty: impl Fn() -> bool,
    ) -> Result<Vec<u64>, Denied> {
        let Visitor { owner, generation, client, epoch, .. } = *visitor;
        if self.ousted.contains(&owner) {
            let present = self.claim.as_ref().map(|(claim, _)| claim.name.clone());
            return Err(Denied::Claimed(present.unwrap_or_else(|| "another owner".to_owned())));
        }
        if let Some((claim, keeps)) = self.claim.as_ref().filter(|(claim, _)| claim.owner != owner)
        {
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
            self.from_generation = 0;
        }
        if visitor.ends_older {
            self.from_generation = self.from_generation.max(generation);
        }
        if generation < self.from_generation {
            return Err(Denied::Late(visitor.name.clone()));
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
            guest.generation < self.from_generation
                || (guest.generation == generation
                    && (guest.client != client || guest.epoch < epoch))
        }))
    }

    fn guests_that(&self, which: impl Fn(&Guest) -> bool) -> Vec<u64> {
        self.guests.iter().filter(|(_, guest)| which(guest)).map(|(id, _)| *id).collect()
    }
}

fn remember<T: PartialEq>(past: &mut VecDeque<T>, one: T) {
    past.retain(|other| *other != one);
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
        Visitor {
            owner,
            name,
            generation: 0,
            ends_older: false,
            client,
            epoch,
            keeps: false,
            takes_over: false,
        }
    }

    fn admit(tenancy: &Arc<Tenancy>, visitor: &Visitor) -> Result<Stay, Denied> {
        tenancy.admit(visitor, || false, |_| Ok(()), Box::new(|| {}))
    }

    #[test]
    fn a_second_owner_is_refused_by_name_until_the_first_has_gone() {
        let tenancy = Tenancy::new(TenancyRecord::default());
        let first = admit(&tenancy, &visitor(1, 1, 1)).unwrap();
        let refused = admit(&tenancy, &visitor(2, 2, 1)).unwrap_err();
        assert_eq!(refused, Denied::Claimed("owner 1".to_owned()));
        drop(first);
        let kept = Visitor { keeps: true, ..visitor(2, 2, 1) };
        drop(admit(&tenancy, &kept).unwrap());
        assert_eq!(
            admit(&tenancy, &visitor(1, 1, 1)).unwrap_err(),
            Denied::Claimed("owner 2".to_owned())
        );
        drop(admit(&tenancy, &Visitor { takes_over: true, ..visitor(3, 3, 1) }).unwrap());
        assert_eq!(
            admit(&tenancy, &kept).unwrap_err(),
            Denied::Claimed("owner 3".to_owned()),
            "its pages are gone"
        );
    }

    #[test]
    fn a_kept_claim_on_nothing_stands_in_nobodys_way() {
        let claim =
            Some(Claim { owner: OwnerId(1), name: "owner 1".to_owned(), from_generation: 0 });
        let tenancy = Tenancy::new(TenancyRecord { claim, ousted: Vec::new() });
        assert!(admit(&tenancy, &visitor(2, 2, 1)).is_err());
        tenancy.admit(&visitor(2, 2, 1), || true, |_| Ok(()), Box::new(|| {})).unwrap();
    }

    #[test]
    fn a_newer_epoch_waits_for_older_connections_to_end() {
        let tenancy = Tenancy::new(TenancyRecord::default());
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
        assert_eq!(
            admit(&tenancy, &visitor(1, 1, 1)).unwrap_err(),
            Denied::Late("owner 1".to_owned())
        );
        drop(old);
        drop(beside);
        newer.join().unwrap().unwrap();
    }

    #[test]
    fn a_new_process_ends_the_old_one_of_its_generation_only() {
        let tenancy = Tenancy::new(TenancyRecord::default());
        let moving = admit(&tenancy, &Visitor { generation: 1, ..visitor(1, 9, 1) }).unwrap();
        drop(admit(&tenancy, &visitor(1, 1, 7)).unwrap());
        drop(admit(&tenancy, &visitor(1, 2, 1)).unwrap());
        assert_eq!(
            admit(&tenancy, &visitor(1, 1, 8)).unwrap_err(),
            Denied::Late("owner 1".to_owned())
        );
        drop(moving);
    }

    #[test]
    fn a_move_for_good_ends_the_host_that_was_left() {
        let tenancy = Tenancy::new(TenancyRecord::default());
        let (told, recorded) =
            (Arc::new(AtomicBool::new(false)), Mutex::new(TenancyRecord::default()));
        let heard = Arc::clone(&told);
        let end: End = Box::new(move || heard.store(true, Ordering::SeqCst));
        let left = tenancy.admit(&visitor(1, 1, 1), || false, |_| Ok(()), end).unwrap();
        let moving = Visitor { generation: 1, keeps: true, ..visitor(1, 2, 1) };
        let beside = admit(&tenancy, &moving).unwrap();
        let moved = Visitor { ends_older: true, epoch: 2, ..moving };
        thread::scope(|scope| {
            let record = |kept| {
                *recorded.lock().unwrap() = kept;
                Ok(())
            };
            let (tenancy, moved) = (&tenancy, &moved);
            let admitted = scope
                .spawn(move || tenancy.admit(moved, || false, record, Box::new(|| {})).map(drop));
            while !told.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            assert!(!admitted.is_finished());
            drop((left, beside));
            admitted.join().unwrap().unwrap();
        });
        // A restarted server remembers it too.
        for tenancy in [tenancy, Tenancy::new(recorded.into_inner().unwrap())] {
            let refused = admit(&tenancy, &visitor(1, 1, 9)).unwrap_err();
            assert_eq!(refused, Denied::Late("owner 1".to_owned()));
            drop(
                admit(&tenancy, &Visitor { epoch: 3, ends_older: false, ..moved.clone() }).unwrap(),
            );
        }
    }

    #[test]
    fn an_ousted_owner_is_remembered_by_the_next_process() {
        let tenancy = Tenancy::new(TenancyRecord::default());
        drop(admit(&tenancy, &Visitor { keeps: true, ..visitor(1, 1, 1) }).unwrap());
        let recorded = Mutex::new(TenancyRecord::default());
        let record = |kept| {
            *recorded.lock().unwrap() = kept;
            Ok(())
        };
        let by_force = Visitor { takes_over: true, ..visitor(2, 2, 1) };
        drop(tenancy.admit(&by_force, || false, record, Box::new(|| {})).unwrap());
        let tenancy = Tenancy::new(recorded.into_inner().unwrap());
        let refused = admit(&tenancy, &visitor(1, 1, 2)).unwrap_err();
        assert_eq!(refused, Denied::Claimed("another owner".to_owned()));
        drop(admit(&tenancy, &visitor(2, 2, 2)).unwrap());
    }
}
