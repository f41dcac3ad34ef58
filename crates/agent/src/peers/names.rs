//! A check that peers reach this host under its name. A peer that reaches another agent under the
//! name sends the grants for this host there.

use std::collections::BTreeSet;

use aquifer_api::client::{CallError, Client};
use aquifer_api::message::Offer;
use aquifer_api::path;
use aquifer_api::status::{EventKind, Standing};
use aquifer_page::lock;

use super::Peers;
use super::offers::OFFER_TIMEOUT;

impl Peers {
    /// Calls this host at every address at which its peers call it, and notes each wrong one.
    pub(super) async fn check_name(&self) {
        let listed = self.all().into_values().filter(|peer| peer.standing == Standing::Listed);
        let calls = listed.filter_map(|peer| peer.last().calls.clone());
        let addresses: BTreeSet<String> = calls.collect();
        let mut strayed = std::collections::BTreeMap::new();
        for address in addresses {
            let client = Client::peer(&address, &self.0.host, self.0.tls.clone())
                .with_timeout(OFFER_TIMEOUT);
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
                "the name {host} is taken: another agent of that name answers at {address}, where \
                 peers call {host}; join one of the two hosts again, under another name"
            )),
            // Peers may reach an address that this host does not: only proof counts.
            Err(CallError::Unreachable { .. } | CallError::TimedOut { .. }) => None,
            Err(error) => Some(format!(
                "peers call {host} at {address}, where this host's agent does not answer: {error}"
            )),
        }
    }

    /// Returns why `address` does not lead to this agent, if the last check found so.
    pub(super) fn astray(&self, address: &str) -> Option<String> {
        self.strayed().get(address).cloned()
    }

    fn strayed(&self) -> std::sync::MutexGuard<'_, std::collections::BTreeMap<String, String>> {
        lock(&self.0.strayed)
    }
}
