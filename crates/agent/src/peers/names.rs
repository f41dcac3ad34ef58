//! Whether peers mean this host by its name. A peer that calls another host by it sends there what it grants this one.

use std::collections::BTreeSet;
use std::sync::PoisonError;

use aquifer_api::client::{CallError, Client};
use aquifer_api::message::Offer;
use aquifer_api::path;
use aquifer_api::status::EventKind;

use super::{OFFER_PATIENCE, Peers};

impl Peers {
    /// Calls this host wherever its peers call it.
    pub(super) async fn check_name(&self) {
        let calls = self
            .0
            .peers
            .values()
            .filter(|peer| peer.listed)
            .filter_map(|peer| peer.last().calls.clone());
        let addresses: BTreeSet<String> = calls.collect();
        let mut strayed = std::collections::BTreeMap::new();
        for address in addresses {
            let client = Client::peer(&address, &self.0.host, self.0.tls.clone())
                .with_timeout(OFFER_PATIENCE);
            let met = client.get::<Offer>(path::OFFER).await;
            if let Some(why) = self.not_me(&address, met) {
                strayed.insert(address, why);
            }
        }
        let before = std::mem::replace(&mut *self.strayed(), strayed.clone());
        for (address, why) in strayed {
            if before.get(&address) != Some(&why) {
                self.0.events.note(EventKind::NameTaken, &self.0.host, why);
            }
        }
    }

    fn not_me(&self, address: &str, met: Result<Offer, CallError>) -> Option<String> {
        let host = &self.0.host;
        match met {
            Ok(offer) if offer.agent == self.0.agent => None,
            Ok(_) | Err(CallError::Refused { .. }) => Some(format!(
                "the name {host} is taken: peers call {host} at {address}, where another agent of that name answers; \
                 give one of the two another name, by 'aquifer init'"
            )),
            // One that cannot be called from here may be so from there: only what is certain counts.
            Err(CallError::Unreachable { .. } | CallError::TimedOut { .. }) => None,
            Err(error) => Some(format!(
                "peers call {host} at {address}, where this host's agent does not answer: {error}"
            )),
        }
    }

    /// Who is met where peers call this host, if that is not this host.
    pub(super) fn astray(&self, address: &str) -> Option<String> {
        self.strayed().get(address).cloned()
    }

    fn strayed(&self) -> std::sync::MutexGuard<'_, std::collections::BTreeMap<String, String>> {
        self.0.strayed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
