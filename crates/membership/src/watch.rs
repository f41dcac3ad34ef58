//! What this host notices in messages beside foca: the answer to its last probe, and a twin, that
//! is, a second host with this host's name. Other hosts believe the twin with the longer life. Each
//! twin hears of the other in what hosts say about members, or in the other's news.

use std::sync::{Arc, Mutex};

use aquifer_page::lock;
use bytes::{Buf, BufMut};
use foca::{Codec, Header, Message, PostcardCodec, ProbeNumber};

use crate::Member;

/// Foca's codec, which also looks for answers to probes and for a twin of this host.
#[derive(Clone, Debug)]
pub(crate) struct Watch(Arc<Mutex<Seen>>);

#[derive(Debug)]
struct Seen {
    own: Member,
    twin: Option<Member>,
    /// The number of the last probe that this host sent, until its answer comes.
    probe: Option<ProbeNumber>,
}

impl Watch {
    pub(crate) fn new(own: Member) -> Self {
        Self(Arc::new(Mutex::new(Seen { own, twin: None, probe: None })))
    }

    /// Notes this host's present life.
    pub(crate) fn lives_as(&self, own: &Member) {
        lock(&self.0).own.clone_from(own);
    }

    /// Returns a twin that was seen since the last call.
    pub(crate) fn twin(&self) -> Option<Member> {
        lock(&self.0).twin.take()
    }

    /// Returns whether the host that this one probed last has not answered.
    pub(crate) fn awaits_answer(&self) -> bool {
        lock(&self.0).probe.is_some()
    }

    /// A host that moved may hear of its own past: that has a smaller life.
    pub(crate) fn look(&self, at: &Member) {
        let mut seen = lock(&self.0);
        let (own, twin) = (&seen.own, at);
        if own.host == twin.host && own.address != twin.address && own.life <= twin.life {
            seen.twin = Some(twin.clone());
        }
    }
}

impl Codec<Member> for Watch {
    type Error = postcard::Error;

    fn encode_header(
        &mut self,
        header: &Header<Member>,
        buf: impl BufMut,
    ) -> Result<(), postcard::Error> {
        if let Message::Ping(number) = &header.message {
            lock(&self.0).probe = Some(*number);
        }
        PostcardCodec.encode_header(header, buf)
    }

    fn decode_header(&mut self, buf: impl Buf) -> Result<Header<Member>, postcard::Error> {
        let header = PostcardCodec.decode_header(buf)?;
        self.look(&header.src);
        if let Message::Ack(number) = &header.message {
            lock(&self.0).probe.take_if(|probe| probe == number);
        }
        Ok(header)
    }

    fn encode_member(
        &mut self,
        member: &foca::Member<Member>,
        buf: impl BufMut,
    ) -> Result<(), postcard::Error> {
        PostcardCodec.encode_member(member, buf)
    }

    fn decode_member(&mut self, buf: impl Buf) -> Result<foca::Member<Member>, postcard::Error> {
        let member: foca::Member<Member> = PostcardCodec.decode_member(buf)?;
        self.look(member.id());
        Ok(member)
    }
}
