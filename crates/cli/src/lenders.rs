//! The lenders given on a command line, each with the lender of the copy of its pages, if there are
//! copies.

use std::path::PathBuf;
use std::slice::ChunksExact;

use aquifer_page::Bytes;
use aquifer_volume::{LeaseTarget, SecondCopy};

use crate::failure::{Failure, Result};
use crate::lender::ClaimedLender;
use crate::lender_uri::LenderUri;

/// Lenders that answered, and serve usable exports.
#[derive(Debug, Default)]
pub struct Lenders {
    /// Their exports, as leases.
    pub leases: Vec<LeaseTarget>,
    /// The exports that hold second copies.
    pub copies: Vec<SecondCopy>,
    /// The directory of the certificate for mutual TLS; `None` without TLS.
    pub identity: Option<PathBuf>,
}

impl Lenders {
    /// Calls `find` for each of the lenders. With `mirror` they come in pairs: the second of each
    /// holds copies of what the first one holds. `what` is the failed step, for errors.
    ///
    /// # Errors
    /// That of `find`. Also if a lender of a pair is missing, or both are the same.
    pub fn find(
        what: &str,
        uris: &[LenderUri],
        mirror: bool,
        mut find: impl FnMut(&LenderUri) -> Result<ClaimedLender>,
    ) -> Result<Self> {
        let mut all = Self::default();
        for uris in groups(what, uris, mirror)? {
            let ClaimedLender { mut lease, identity } = find(&uris[0])?;
            all.identity = all.identity.or(identity);
            if let Some(uri) = uris.get(1) {
                let ClaimedLender { lease: mut copy, identity } = find(uri)?;
                all.identity = all.identity.or(identity);
                if lease.is_same_place(&copy) {
                    let why = format!("{uri} cannot hold the copy of its own pages");
                    return Err(Failure::new(what, why).help("name lenders on two hosts"));
                }
                // Each must hold what the other holds.
                lease.capacity = lease.capacity.min(copy.capacity);
                copy.capacity = lease.capacity;
                all.copies.push(SecondCopy { of: lease.lease, lease: copy, lags: false });
            }
            all.leases.push(lease);
        }
        Ok(all)
    }

    /// Returns how much the lenders hold, without copies.
    pub fn capacity(&self) -> Bytes {
        self.leases.iter().map(|lease| lease.capacity).sum()
    }

    /// Returns all leases, those that hold copies last.
    pub fn all(&self) -> impl Iterator<Item = &LeaseTarget> {
        self.leases.iter().chain(self.copies.iter().map(|copy| &copy.lease))
    }
}

/// Returns the lenders, each with the one that has the copy, if there are copies.
fn groups<'a>(
    what: &str,
    lenders: &'a [LenderUri],
    mirror: bool,
) -> Result<ChunksExact<'a, LenderUri>> {
    let pairs = lenders.chunks_exact(if mirror { 2 } else { 1 });
    let alone = pairs.remainder().first();
    let twice = pairs.clone().find(|pair| pair.iter().skip(1).any(|uri| *uri == pair[0]));
    let why = match (alone, twice) {
        (Some(lender), _) => format!("{lender} has no second lender for the copy"),
        (_, Some(pair)) => format!("{} cannot hold the copy of its own pages", pair[0]),
        (None, None) => return Ok(pairs),
    };
    Err(Failure::new(what, why).help("name lenders in pairs, on two hosts each"))
}
