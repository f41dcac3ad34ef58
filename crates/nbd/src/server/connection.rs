//! The life of one connection: handshake, session, and reports of its start and end.

use std::sync::Arc;

use aquifer_transport::channel::Socket;
use aquifer_transport::serving::{Connected, Origin, Place, Service};

use super::handshake::{self, Terms};
use super::session::Session;
use super::{Exports, Limits, Peer, Security};

/// The state that all connections of a server share.
pub(super) struct Nbd {
    pub(super) security: Security,
    pub(super) exports: Arc<dyn Exports>,
    pub(super) limits: Limits,
}

impl Service for Nbd {
    const NAME: &'static str = "nbd";

    fn serve(&self, socket: Socket, origin: Origin, place: &Place<Self>) {
        let Origin { local, ip, process, from } = origin;
        let mut peer = Peer { host: None, local, process, ip, from };
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
        // Kept until the session ends: other clients that wait for its end must not go on earlier.
        let _stay = terms.stay.take();
        place.settle(lease);
        let _connected = lease.map(|lease| Connected::new(&*self.exports, lease));
        let export = terms.name.clone();
        tracing::info!(%export, "{peer} connected");
        match Session::new(terms).run() {
            Ok(()) => tracing::info!(%export, "{peer} disconnected"),
            Err(error) => tracing::info!(%export, "connection from {peer} ended: {error}"),
        }
    }
}
