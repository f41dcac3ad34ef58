//! Calls of agents to agents over the network: packets, answers, timeouts.

use std::time::Duration;

use aquifer_control::Message;
use aquifer_control::node::{Input, Said};
use aquifer_page::Bytes;
use rand::RngExt as _;

use super::{Call, CallKind, Offered};
use crate::event::{Ask, CallId, Content, Event, HostNumber, Packet, Reply};
use crate::simulation::Simulation;

/// The timeout of a call, as in the agent.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);

/// The timeout of a question for an offer, as in the agent.
const OFFER_TIMEOUT: Duration = Duration::from_secs(1);

/// The timeout of an order, as in the agent.
const ASK_TIMEOUT: Duration = Duration::from_secs(60);

/// The share of messages that take much longer, so that others overtake them.
const STRAGGLERS: f64 = 0.02;

/// How many times longer they take.
const STRAGGLING: f64 = 20.0;

impl Simulation {
    /// Calls another agent. The answer or the timeout comes back as an event.
    pub(super) fn call(&mut self, from: HostNumber, to: HostNumber, kind: CallKind, ask: Ask) {
        let call = CallId(self.number());
        let timeout = match kind {
            CallKind::Offer(_) => OFFER_TIMEOUT,
            CallKind::Say(_) | CallKind::Renew => CALL_TIMEOUT,
            CallKind::Permit | CallKind::Arrive => ASK_TIMEOUT,
        };
        if let Some(agent) = &mut self.hosts[from].agent {
            if let CallKind::Offer(slot) = kind
                && let Some(sampling) = agent.sampling(slot)
            {
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
        self.counts.network.messages += 1;
        let is_offer = matches!(packet.content, Content::Ask(Ask::Offer | Ask::Room(_)));
        self.counts.network.offer_questions += u64::from(is_offer);
        let network = self.scenario.network;
        if self.is_cut_off(packet.from, packet.to) || self.rng.random_bool(network.loss) {
            self.counts.network.lost_messages += 1;
            return;
        }
        if self.rng.random_bool(network.duplication) {
            self.counts.network.duplicates += 1;
            let at = self.arrival();
            self.agenda.enter(at, Event::Arrival(Box::new(packet.clone())));
        }
        let at = self.arrival();
        self.agenda.enter(at, Event::Arrival(Box::new(packet)));
    }

    /// Draws the time at which a message arrives.
    pub(super) fn arrival(&mut self) -> Duration {
        let slowness = if self.rng.random_bool(STRAGGLERS) { STRAGGLING } else { 1.0 };
        let times = slowness * self.rng.random_range(0.5..1.5);
        self.now + self.scenario.network.delay.mul_f64(times)
    }

    pub(crate) fn arrive(&mut self, packet: Packet) {
        let Packet { from, to, call, content } = packet;
        if self.is_cut_off(from, to) || self.hosts[to].agent.is_none() {
            self.counts.network.lost_messages += 1;
            return;
        }
        match content {
            Content::Ask(ask) => self.asked(from, to, call, ask),
            Content::Reply(reply) => self.replied(to, call, reply),
        }
    }

    fn asked(&mut self, from: HostNumber, to: HostNumber, call: CallId, ask: Ask) {
        let ask = match ask {
            Ask::Offer | Ask::Room(_) => return self.asked_for_offer(from, to, call, &ask),
            Ask::Arrive(arrive) => return self.ask_to_take(to, from, call, arrive),
            ask => ask,
        };
        let receiver = match ask {
            Ask::Permit { to, .. } => Some(self.hosts[to].name.clone()),
            _ => None,
        };
        let Some(agent) = &mut self.hosts[to].agent else { return };
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
                let generations = leases.iter().copied().filter(|(_, generation)| *generation > 0);
                let generations = generations.collect();
                let leases = leases.into_iter().map(|(lease, _)| lease).collect();
                Input::Renewal { from: name, leases, generations, io_timeout_ms, ticket }
            }
            Ask::Permit { lease, generation, .. } => {
                let Some(to) = receiver else { return };
                Input::Permit { from: name, lease, generation, to, ticket }
            }
            Ask::Offer | Ask::Room(_) | Ask::Arrive(_) => return,
        };
        self.input(to, input);
    }

    fn asked_for_offer(&mut self, from: HostNumber, to: HostNumber, call: CallId, ask: &Ask) {
        let Some(agent) = &self.hosts[to].agent else { return };
        if self.hosts[to].parted.contains(&from) {
            return self.answer_call(to, from, call, Reply::NoPeer);
        }
        let offer = match ask {
            Ask::Room(below) => {
                let (spare, none) = (agent.node.room_for_vms(*below), Bytes::ZERO);
                Offered { spare, for_regions: none, for_copies: none }
            }
            _ => Offered {
                spare: agent.node.controller().spare(),
                for_regions: agent.node.controller().spare_for_regions(),
                for_copies: agent.node.controller().spare_for_copies(),
            },
        };
        self.answer_call(to, from, call, Reply::Offer(offer));
    }

    /// Notes that a lender has heard of the end of a lease from its borrower.
    fn note_fin(&mut self, borrower: HostNumber, lender: HostNumber, message: &Message) {
        let Message::MemBorFin { lease, generation } = message else { return };
        let name = self.hosts[borrower].name.clone();
        if let Some(kept) = self.hosts[lender].machine.store.get_mut(lease)
            && (&kept.lent.borrower, kept.lent.generation) == (&name, *generation)
            && kept.lent.next.is_empty()
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
            (CallKind::Offer(slot), Reply::Offer(offer)) => {
                self.offered(host, (call, slot), Some((ended.to, offer)));
            }
            (CallKind::Permit, reply) => self.permitted(host, Some(reply)),
            (CallKind::Arrive, reply) => self.asked_to_take(host, Some(reply)),
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
            CallKind::Offer(slot) => self.offered(host, (call, slot), None),
            CallKind::Permit => self.permitted(host, None),
            CallKind::Arrive => self.asked_to_take(host, None),
        }
    }
}
