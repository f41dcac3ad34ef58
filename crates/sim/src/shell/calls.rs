//! Calls of agents to agents over the network: packets, answers, timeouts.

use std::collections::BTreeMap;
use std::time::Duration;

use aquifer_control::Message;
use aquifer_control::node::{Input, Said};
use rand::RngExt as _;

use super::{Call, CallKind};
use crate::event::{Ask, CallId, Content, Event, HostNumber, Packet, Reply};
use crate::simulation::Simulation;

/// The timeout of a call, as in the agent.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);

/// The timeout of a question for an offer, as in the agent.
const OFFER_TIMEOUT: Duration = Duration::from_secs(1);

/// The share of messages that take much longer, so that others overtake them.
const STRAGGLERS: f64 = 0.02;

/// How many times longer they take.
const STRAGGLING: f64 = 20.0;

impl Simulation {
    /// Calls another agent. The answer or the timeout comes back as an event.
    pub(super) fn call(&mut self, from: HostNumber, to: HostNumber, kind: CallKind, ask: Ask) {
        let call = CallId(self.number());
        let timeout = match kind {
            CallKind::Offer => OFFER_TIMEOUT,
            CallKind::Say(_) | CallKind::Renew => CALL_TIMEOUT,
        };
        if let Some(agent) = &mut self.hosts[from].agent {
            if let (CallKind::Offer, Some(sampling)) = (&kind, &mut agent.sampling) {
                sampling.awaits(call);
            }
            agent.calls.insert(call, Call { to, kind });
        }
        self.agenda.enter(self.now + timeout, Event::CallOver(from, call));
        self.send(Packet { from, to, call, content: Content::Ask(ask) });
    }

    /// Answers a call.
    pub(super) fn answer_call(
        &mut self,
        from: HostNumber,
        to: HostNumber,
        call: CallId,
        reply: Reply,
    ) {
        self.send(Packet { from, to, call, content: Content::Reply(reply) });
    }

    /// Hands a packet to the network, which may lose, delay and duplicate it.
    fn send(&mut self, packet: Packet) {
        self.counts.messages += 1;
        let is_offer = matches!(packet.content, Content::Ask(Ask::Offer));
        self.counts.offer_questions += u64::from(is_offer);
        let network = self.scenario.network;
        if self.is_cut_off(packet.from, packet.to) || self.rng.random_bool(network.loss) {
            self.counts.lost_messages += 1;
            return;
        }
        if self.rng.random_bool(network.duplication) {
            self.counts.duplicates += 1;
            let at = self.arrival();
            self.agenda.enter(at, Event::Arrival(packet.clone()));
        }
        let at = self.arrival();
        self.agenda.enter(at, Event::Arrival(packet));
    }

    fn arrival(&mut self) -> Duration {
        let slowness = if self.rng.random_bool(STRAGGLERS) { STRAGGLING } else { 1.0 };
        let times = slowness * self.rng.random_range(0.5..1.5);
        self.now + self.scenario.network.delay.mul_f64(times)
    }

    pub(crate) fn arrive(&mut self, packet: Packet) {
        let Packet { from, to, call, content } = packet;
        if self.is_cut_off(from, to) || self.hosts[to].agent.is_none() {
            self.counts.lost_messages += 1;
            return;
        }
        match content {
            Content::Ask(ask) => self.asked(from, to, call, ask),
            Content::Reply(reply) => self.replied(to, call, reply),
        }
    }

    fn asked(&mut self, from: HostNumber, to: HostNumber, call: CallId, ask: Ask) {
        let Some(agent) = &mut self.hosts[to].agent else { return };
        if let Ask::Offer = ask {
            let spare = agent.node.controller().spare();
            let is_peer = !self.hosts[to].parted.contains(&from);
            let reply = if is_peer { Reply::Offer(spare) } else { Reply::NoPeer };
            return self.answer_call(to, from, call, reply);
        }
        let ticket = agent.ticket();
        agent.tickets.insert(ticket, (from, call));
        let name = self.hosts[from].name.clone();
        let input = match ask {
            Ask::Say(message) => {
                self.note_fin(from, to, &message);
                Input::Heard { from: name, message, ticket }
            }
            Ask::Renew(leases) => {
                let io_timeout_ms = u64::try_from(self.scenario.costs.io_timeout.as_millis()).ok();
                let generations = BTreeMap::new();
                Input::Renewal { from: name, leases, generations, io_timeout_ms, ticket }
            }
            Ask::Offer => return,
        };
        self.input(to, input);
    }

    /// Notes that a lender has heard of the end of a lease from its borrower.
    fn note_fin(&mut self, borrower: HostNumber, lender: HostNumber, message: &Message) {
        let Message::MemBorFin { lease, .. } = message else { return };
        let name = self.hosts[borrower].name.clone();
        if let Some(kept) = self.hosts[lender].machine.store.get_mut(lease)
            && kept.lent.borrower == name
        {
            kept.is_finished = true;
        }
    }

    /// Takes an answer. Answers that come late, twice or to a former agent match no call.
    fn replied(&mut self, host: HostNumber, call: CallId, reply: Reply) {
        let Some(ended) = self.hosts[host].agent.as_mut().and_then(|a| a.calls.remove(&call))
        else {
            return;
        };
        let to = self.hosts[ended.to].name.clone();
        match (ended.kind, reply) {
            (CallKind::Say(message), Reply::Taken(failed)) => {
                self.input(host, Input::Said { to, message, end: Said::Taken(failed) });
            }
            (CallKind::Say(message), Reply::NoPeer) => {
                let end = Said::Refused("this host is not a peer".to_owned());
                self.input(host, Input::Said { to, message, end });
            }
            (CallKind::Renew, Reply::Renewed(lost)) => {
                self.input(host, Input::Renewed { lender: to, lost });
            }
            (CallKind::Offer, Reply::Offer(spare)) => {
                self.offered(host, call, Some((ended.to, spare)));
            }
            (kind, _) => self.unanswered(host, call, ended.to, kind),
        }
    }

    pub(crate) fn call_over(&mut self, host: HostNumber, call: CallId) {
        let agent = self.hosts[host].agent.as_mut();
        if let Some(over) = agent.and_then(|agent| agent.calls.remove(&call)) {
            self.unanswered(host, call, over.to, over.kind);
        }
    }

    fn unanswered(&mut self, host: HostNumber, call: CallId, to: HostNumber, kind: CallKind) {
        let to = self.hosts[to].name.clone();
        match kind {
            CallKind::Say(message) => {
                self.input(host, Input::Said { to, message, end: Said::Lost });
            }
            CallKind::Renew => self.input(host, Input::Renewed { lender: to, lost: Vec::new() }),
            CallKind::Offer => self.offered(host, call, None),
        }
    }
}
