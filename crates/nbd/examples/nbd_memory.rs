//! A server of one elastic lease as the default export: `nbd_memory ADDRESS SIZE [STORE_DIR]`.
//!
//! It runs until a signal kills it.

mod memory;

use std::env;
use std::error::Error;
use std::sync::Arc;

use aquifer_nbd::server::{Exports, Peer, Refused, Security, Server, Storage};
use aquifer_store::Lease;
use aquifer_transport::Address;
use aquifer_transport::serving::Connections;

/// Exports of one lease, open to every peer.
struct OnlyOne(Arc<Lease>);

impl Connections for OnlyOne {}

impl Exports for OnlyOne {
    fn open(&self, name: &str, _peer: &Peer) -> Result<Storage, Refused> {
        if name.is_empty() {
            Ok(Storage::Lease(self.0.clone()))
        } else {
            Err(Refused::Unknown(name.to_owned()))
        }
    }

    fn list(&self, _peer: &Peer) -> Vec<String> {
        vec![String::new()]
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = env::args().skip(1);
    let (Some(address), Some(size)) = (args.next(), args.next()) else {
        return Err("usage: nbd_memory ADDRESS SIZE [STORE_DIR]".into());
    };
    let address: Address = address.parse()?;
    let lease = memory::lease(size.parse()?, args.next())?;
    let server = Server::bind(&address, Security::Plain, Arc::new(OnlyOne(lease)))?;
    println!("listening on {}", server.address());
    loop {
        std::thread::park();
    }
}
