use std::sync::Arc;

use aquifer_page::LeaseId;

use super::handshake::{self, Terms};
use super::session::Session;
use super::{Exports, Limits, Peer, Security};
use crate::channel::Socket;
use crate::serving::{Origin, Place, Service};

/// What every connection of a server needs.
pub(super) struct Nbd {
    pub(super) security: Security,
    pub(super) exports: Arc<dyn Exports>,
    pub(super) limits: Limits,
}

impl Service for Nbd {
    const NAME: &'static str = "nbd";

    fn serve(&self, socket: Socket, origin: Origin, place: &Place<Self>) {
        let Origin { local, process, from, .. } = origin;
        let mut peer = Peer { host: None, local, process, from };
        let (limit, end) = (self.limits.handshake, || place.end());
        match handshake::run(socket, &self.security, &*self.exports, &mut peer, limit, &end) {
            Ok(Some(terms)) => self.transmit(terms, &peer, place),
            Ok(None) => {}
            Err(error) => tracing::info!("handshake with {peer} failed: {error}"),
        }
    }
}

impl Nbd {
    fn transmit(&self, mut terms: Terms, peer: &Peer, place: &Place<Self>) {
        let lease = terms.export.id();
        // Until the session is over: those that wait for the end of this one must not go on before.
        let _stay = terms.stay.take();
        place.settle(lease);
        let _connected = lease.map(|lease| Connected::new(&*self.exports, lease));
        let export = terms.name.clone();
        tracing::info!(%export, "{peer} connected");
        match Session::new(terms).run() {
            Ok(()) => tracing::info!(%export, "{peer} disconnected"),
            Err(error) => tracing::info!(%export, "connection of {peer} ended: {error}"),
        }
    }
}

/// Tells the exports of a connection's beginning and, when dropped, of its end.
struct Connected<'a> {
    exports: &'a dyn Exports,
    lease: LeaseId,
}

impl<'a> Connected<'a> {
    fn new(exports: &'a dyn Exports, lease: LeaseId) -> Self {
        exports.connected(lease);
        Self { exports, lease }
    }
}

impl Drop for Connected<'_> {
    fn drop(&mut self) {
        self.exports.disconnected(self.lease);
    }
}
