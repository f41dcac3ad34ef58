//! What a host tells all others of itself, besides that it lives.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use aquifer_page::{Bytes, EXTENT_SIZE, HostName, Zone, lock};
use foca::{BroadcastHandler, Invalidates};
use serde::{Deserialize, Serialize};

use crate::Member;
use crate::watch::Watch;

/// What a host tells of itself that does not change while its agent runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// Whether it can admit hosts to the cluster.
    pub admits: bool,
    /// The zone that it is in.
    pub zone: Option<Zone>,
}

/// What a host tells all others of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct News {
    /// The host.
    pub of: Member,
    /// Counts the news of one life of the host.
    pub number: u64,
    /// The extents that it can lend, rounded down.
    spare: u64,
    /// What does not change while its agent runs.
    pub about: About,
    /// Whether it leaves the cluster for good.
    pub(crate) leaves: bool,
    /// A digest of what it knows of the groups' agreements.
    pub agreements: Option<u64>,
    /// A digest of the revocations that it knows.
    pub revocations: Option<u64>,
}

impl News {
    /// Returns the first news of a host.
    pub(crate) fn first(of: Member, about: About) -> Self {
        Self { of, number: 0, spare: 0, about, leaves: false, agreements: None, revocations: None }
    }

    /// Returns the memory that the host can lend, rounded down: the number of its extents has two
    /// significant bits, so that small changes are no news.
    pub fn spare(&self) -> Bytes {
        Bytes(self.spare.saturating_mul(EXTENT_SIZE))
    }

    /// Notes the memory that the host can lend; returns whether that is news.
    pub(crate) fn set_spare(&mut self, spare: Bytes) -> bool {
        let extents = spare.0 / EXTENT_SIZE;
        let low = extents.checked_ilog2().unwrap_or(0).saturating_sub(1);
        let rounded = extents >> low << low;
        std::mem::replace(&mut self.spare, rounded) != rounded
    }

    fn order(&self) -> (&HostName, u64, u64) {
        (&self.of.host, self.of.life, self.number)
    }
}

/// The newest news of each host; shared with foca, which passes on what is new here.
#[derive(Clone, Debug, Default)]
pub(crate) struct Board(Arc<Mutex<BTreeMap<HostName, News>>>);

impl Board {
    pub(crate) fn of(&self, host: &HostName) -> Option<News> {
        lock(&self.0).get(host).cloned()
    }

    /// Forgets the hosts that are not `known`.
    pub(crate) fn keep(&self, known: &BTreeSet<HostName>) {
        lock(&self.0).retain(|host, _| known.contains(host));
    }

    /// Takes news in, unless they are old.
    fn pin(&self, news: News) -> bool {
        let mut board = lock(&self.0);
        let is_new = board.get(&news.of.host).is_none_or(|known| known.order() < news.order());
        if is_new {
            board.insert(news.of.host.clone(), news);
        }
        is_new
    }
}

/// News on their way.
#[derive(Debug)]
pub(crate) struct OnTheWay(News);

impl Invalidates for OnTheWay {
    fn invalidates(&self, other: &Self) -> bool {
        self.0.of.host == other.0.of.host && self.0.order() >= other.0.order()
    }
}

/// Takes in the news that foca receives.
#[derive(Debug)]
pub(crate) struct Receiver {
    pub(crate) own: HostName,
    pub(crate) board: Board,
    pub(crate) watch: Watch,
}

impl BroadcastHandler<Member> for Receiver {
    type Key = OnTheWay;
    type Error = postcard::Error;

    fn receive_item(
        &mut self,
        data: &[u8],
        sender: Option<&Member>,
    ) -> Result<Option<OnTheWay>, postcard::Error> {
        // The news of an older version lack the last fields: zero is `None`.
        let news: News = postcard::from_bytes(data)
            .or_else(|_| postcard::from_bytes(&[data, &[0]].concat()))
            .or_else(|_| postcard::from_bytes(&[data, &[0, 0]].concat()))?;
        if sender.is_some() && news.of.host == self.own {
            self.watch.look(&news.of);
            return Ok(None);
        }
        Ok(self.board.pin(news.clone()).then_some(OnTheWay(news)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn news_of_an_older_version_tell_no_digests() {
        let host = |name: &str| Member {
            host: name.parse().unwrap(),
            address: std::net::SocketAddr::from(([127, 0, 0, 1], 1)),
            life: 1,
        };
        let board = Board::default();
        let (own, watch) = (host("b").host, Watch::new(host("b")));
        let mut receiver = Receiver { own, board: board.clone(), watch };
        let mut news = News::first(host("a"), About::default());
        for (missing, number) in [(1, 0), (2, 1)] {
            news.number = number;
            let older = postcard::to_allocvec(&news).unwrap();
            let (older, last) = older.split_at(older.len() - missing);
            assert_eq!(last, &[0, 0][..missing]);
            assert!(receiver.receive_item(older, Some(&host("a"))).unwrap().is_some());
            assert_eq!(board.of(&news.of.host), Some(news.clone()));
        }
        (news.number, news.agreements, news.revocations) = (2, Some(u64::MAX), Some(7));
        let newer = postcard::to_allocvec(&news).unwrap();
        assert!(receiver.receive_item(&newer, Some(&host("a"))).unwrap().is_some());
        assert_eq!(board.of(&news.of.host), Some(news));
        receiver.receive_item(&newer[..4], Some(&host("a"))).unwrap_err();
    }

    #[test]
    fn spare_memory_is_told_in_steps_of_a_quarter_to_a_half() {
        let member = Member {
            host: "a".parse().unwrap(),
            address: std::net::SocketAddr::from(([127, 0, 0, 1], 1)),
            life: 1,
        };
        let mut news = News::first(member, About::default());
        assert!(!news.set_spare(Bytes(EXTENT_SIZE - 1)));
        let mut steps = Vec::new();
        for extents in 1..=17 {
            if news.set_spare(Bytes(extents * EXTENT_SIZE)) {
                steps.push((extents, news.spare().0 / EXTENT_SIZE));
            }
        }
        assert_eq!(steps.len(), 8);
        assert!(steps.iter().all(|(extents, told)| extents == told), "{steps:?}");
    }
}
