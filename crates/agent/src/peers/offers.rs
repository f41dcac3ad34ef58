//! What other hosts can spare, and what this one can.

use std::collections::BTreeSet;
use std::hash::{BuildHasher as _, RandomState};
use std::time::{Duration, Instant};

use aquifer_api::message;
use aquifer_api::status::Standing;
use aquifer_api::{Problem, Threshold, path};
use aquifer_control::Offer;
use aquifer_page::{Bytes, EXTENT_SIZE, HostName};
use tokio::task::JoinSet;

use super::{Peer, Peers};

/// Timeout of an answer with an offer: an overloaded host cannot wait for a dead one.
pub(super) const OFFER_TIMEOUT: Duration = Duration::from_secs(1);

/// How many hosts of a cluster get the question for offers at a time.
const SAMPLE: usize = 4;

/// The memory that this host can spare.
#[derive(Clone, Copy, Debug)]
pub struct Spare {
    /// For swap of other hosts.
    pub swap: Bytes,
    /// For their regions.
    pub regions: Bytes,
    /// For second copies that go first.
    pub copies: Bytes,
    /// For VMs that come here.
    pub vms: Bytes,
}

impl Peers {
    /// Answers `from`, which asks how much this host would lend.
    ///
    /// # Errors
    /// If `from` is neither a peer nor this host's own name.
    pub fn offer(&self, from: &HostName, spare: &Spare) -> Result<message::Offer, Problem> {
        if *from != self.0.host {
            self.admit(from)?;
        }
        let you = self.get(from).map(|peer| peer.address.clone()).unwrap_or_default();
        let (host, agent) = (self.0.host.clone(), self.0.agent.clone());
        // Older agents do not know these fields.
        let for_regions = (spare.regions != spare.swap).then_some(spare.regions);
        let for_copies = (spare.copies != spare.regions).then_some(spare.copies);
        let (spare, room) = (spare.swap, spare.vms);
        Ok(message::Offer { host, spare, for_regions, for_copies, room, agent, you })
    }

    /// Returns offers of memory: of all peers of the configuration, and of a sample of the
    /// cluster's hosts. If no host of the sample can lend, or all together not what regions need,
    /// it asks the next few, and so on.
    pub async fn offers(&self, regions_need: Bytes) -> Vec<Offer> {
        let offer = |(host, offer): (HostName, message::Offer)| {
            let for_regions = offer.for_regions.unwrap_or(offer.spare);
            Offer {
                zone: self.get(&host).and_then(|peer| peer.about.zone.clone()),
                host,
                spare: offer.spare,
                for_regions,
                for_copies: offer.for_copies.unwrap_or(for_regions),
            }
        };
        let suffice = |offers: &[Offer]| {
            let for_regions = offers.iter().map(|offer| offer.for_regions);
            match regions_need {
                Bytes::ZERO => offers.iter().any(|offer| offer.spare >= Bytes(EXTENT_SIZE)),
                need => for_regions.fold(Bytes::ZERO, Bytes::saturating_add) >= need,
            }
        };
        self.offers_until((offer, Threshold::Upper), suffice, &BTreeSet::new()).await
    }

    /// Returns offers of room for a VM, in the same way, until a host has `least` below the
    /// threshold. Does not ask the hosts in `except`.
    pub async fn rooms(
        &self,
        (least, below): (Bytes, Threshold),
        except: &BTreeSet<HostName>,
    ) -> Vec<Offer> {
        let offer = |(host, offer): (HostName, message::Offer)| Offer::new(host, offer.room);
        let suffice = |offers: &[Offer]| offers.iter().any(|offer| offer.spare >= least);
        self.offers_until((offer, below), suffice, except).await
    }

    async fn offers_until(
        &self,
        (offer, below): (impl Fn((HostName, message::Offer)) -> Offer, Threshold),
        suffice: impl Fn(&[Offer]) -> bool,
        except: &BTreeSet<HostName>,
    ) -> Vec<Offer> {
        let listed = self.standing(Standing::Listed).filter(|host| !except.contains(host));
        let listed = self.ask_offers(listed, below).await;
        let mut offers: Vec<_> = listed.into_iter().map(&offer).collect();
        let mut likely = self.likely_lenders();
        likely.retain(|host| !except.contains(host));
        for sample in likely.chunks(SAMPLE) {
            let sample = self.ask_offers(sample.iter().cloned(), below).await;
            offers.extend(sample.into_iter().map(&offer));
            if suffice(&offers) {
                break;
            }
        }
        offers
    }

    /// Returns the cluster's hosts that are up, in random order: first those that can lend by their
    /// news, then those without news.
    fn likely_lenders(&self) -> Vec<HostName> {
        let random = RandomState::new();
        let all = self.all().into_iter();
        let up = all.filter(|(_, peer)| peer.standing == Standing::Up);
        let likely = |peer: &Peer| match peer.last().spare {
            Some((spare, _)) if spare >= Bytes(EXTENT_SIZE) => 0,
            None => 1,
            Some(_) => 2,
        };
        let mut ranked: Vec<_> =
            up.map(|(host, peer)| (likely(&peer), random.hash_one(&host), host)).collect();
        ranked.sort();
        ranked.into_iter().map(|(_, _, host)| host).collect()
    }

    /// Asks these peers at once, and returns the offers that arrive within a second. Offers of
    /// peers that reach another agent under this host's name are left out: their grants would go
    /// there.
    pub(super) async fn ask_offers(
        &self,
        hosts: impl IntoIterator<Item = HostName>,
        below: Threshold,
    ) -> Vec<(HostName, message::Offer)> {
        let mut calls = JoinSet::new();
        for host in hosts {
            let peers = self.clone();
            calls.spawn(async move {
                let client = peers.get(&host)?.client.clone().with_timeout(OFFER_TIMEOUT);
                let answer = client.get::<message::Offer>(&path::offer(below)).await;
                peers.remember(&host, &answer, |last, offer| {
                    last.spare = Some((offer.spare, Instant::now()));
                    last.calls = Some(offer.you.clone()).filter(|you| !you.is_empty());
                });
                let offer = answer.ok()?;
                peers.astray(&offer.you).is_none().then_some((host, offer))
            });
        }
        calls.join_all().await.into_iter().flatten().collect()
    }
}
