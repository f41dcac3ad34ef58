//! The choice of the lender to ask next: worst-fit, in whole extents.

use std::cmp::Reverse;

use aquifer_page::{Bytes, EXTENT_SIZE, HostName, Zone};
use serde::{Deserialize, Serialize};

use crate::Owner;

/// A peer and the memory that it offers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The peer.
    pub host: HostName,
    /// The bytes that it would grant to swap at present.
    pub spare: Bytes,
    /// The bytes that it would grant to regions at present: roles do not limit these.
    pub for_regions: Bytes,
    /// The bytes that it would grant to second copies that go first.
    #[serde(default)]
    pub for_copies: Bytes,
    /// The zone that it is in, if it has told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<Zone>,
}

impl Offer {
    /// Returns the offer of a host that would grant the same to regions as to swap.
    pub fn new(host: HostName, spare: Bytes) -> Self {
        Self { host, spare, for_regions: spare, for_copies: spare, zone: None }
    }

    /// Returns the part of the offer that is for `owner`.
    pub(crate) fn to(&self, owner: &Owner) -> Self {
        let spare = if owner.is_swap() { self.spare } else { self.for_regions };
        Self::new(self.host.clone(), spare)
    }

    /// Returns the part of the offer that is for second copies of the owner's pages.
    pub(crate) fn to_copies(&self, owner: &Owner, go_first: bool) -> Self {
        match go_first {
            true => Self::new(self.host.clone(), self.for_copies),
            false => self.to(owner),
        }
    }
}

/// The lenders still to be asked, worst-fit: the largest spare first, so that load spreads; ties go
/// by name.
#[derive(Clone, Debug, Default)]
pub struct Candidates {
    /// In ascending order of preference: the next one is the last.
    offers: Vec<Offer>,
}

impl Candidates {
    /// Returns the offers that hold at least one extent.
    pub fn new(offers: impl IntoIterator<Item = Offer>) -> Self {
        let mut candidates = Self::default();
        offers.into_iter().for_each(|offer| candidates.add(offer));
        candidates
    }

    /// Adds an offer, if it holds at least one extent. A lender already taken may come back with
    /// another offer.
    pub fn add(&mut self, offer: Offer) {
        if offer.spare >= Bytes(EXTENT_SIZE) {
            self.offers.push(offer);
            self.offers.sort_by_cached_key(|offer| (offer.spare, Reverse(offer.host.clone())));
        }
    }

    /// Returns whether no lender is left to ask.
    pub fn is_empty(&self) -> bool {
        self.offers.is_empty()
    }

    /// Takes the next lender, and the size to ask it for: the missing bytes, but at most its whole
    /// spare extents.
    pub fn take(&mut self, missing: Bytes) -> Option<(HostName, Bytes)> {
        let offer = self.offers.pop()?;
        let whole = whole_extents(offer.spare);
        Some((offer.host, missing.round_up_to_extents().min(whole)))
    }
}

/// Returns the whole extents that fit in `bytes`.
pub(crate) fn whole_extents(bytes: Bytes) -> Bytes {
    Bytes(bytes.0 / EXTENT_SIZE * EXTENT_SIZE)
}

/// Returns whether `bytes` are one or more whole extents, as every request and lease must be.
pub(crate) fn in_whole_extents(bytes: Bytes) -> bool {
    bytes > Bytes::ZERO && whole_extents(bytes) == bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(host: &str, mib: u64) -> Offer {
        Offer::new(host.parse().unwrap(), Bytes::mib(mib))
    }

    fn order(candidates: &mut Candidates, missing: u64) -> Vec<(String, u64)> {
        let mut asked = Vec::new();
        while let Some((host, bytes)) = candidates.take(Bytes::mib(missing)) {
            asked.push((host.to_string(), bytes.0 >> 20));
        }
        asked
    }

    #[test]
    fn largest_spare_is_asked_first_and_ties_go_by_name() {
        let mut candidates =
            Candidates::new([offer("c", 128), offer("b", 640), offer("a", 128), offer("d", 256)]);
        let expected = [("b", 512), ("d", 256), ("a", 128), ("c", 128)]
            .map(|(host, mib)| (host.to_owned(), mib));
        assert_eq!(order(&mut candidates, 512), expected);
    }

    #[test]
    fn requests_are_for_whole_extents_and_at_least_one() {
        let mut candidates = Candidates::new([offer("a", 63), offer("b", 200)]);
        assert_eq!(order(&mut candidates, 1000), [("b".to_owned(), 192)]);
        assert_eq!(order(&mut Candidates::new([offer("b", 200)]), 65), [("b".to_owned(), 128)]);
    }
}
