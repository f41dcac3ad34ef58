//! Serves one elastic lease as the default export until it is killed: `nbd_memory ADDRESS SIZE [STORE_DIR]`.

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::{env, fs, process};

use aquifer_fabric::Address;
use aquifer_fabric::nbd::server::{Exports, Peer, Refused, Security, Server};
use aquifer_page::{Bytes, Group, LeaseId};
use aquifer_store::{Lease, LeaseRecord, Store};

/// One lease, for everybody.
struct OnlyOne(Arc<Lease>);

impl Exports for OnlyOne {
    fn open(&self, name: &str, _peer: &Peer) -> Result<Arc<Lease>, Refused> {
        if name.is_empty() { Ok(Arc::clone(&self.0)) } else { Err(Refused::Unknown(name.to_owned())) }
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
    let capacity: Bytes = size.parse()?;
    let own_dir = PathBuf::from(format!("/dev/shm/aquifer-example-{}", process::id()));
    let dir = args.next().map_or(own_dir, PathBuf::from);

    let store = Store::open(&dir)?;
    let (id, borrower) = (LeaseId::random(), "localhost".parse()?);
    let record =
        LeaseRecord { id, borrower, group: Group::default(), capacity, quota: capacity, note: ().into() };
    let lease = match store.leases().pop() {
        Some(left_by_the_last_run) => left_by_the_last_run,
        None => store.create(record)?,
    };
    // The memory is the open file from here on, and gone with this process, unless the caller wants to find it again.
    if env::args().len() < 4 {
        fs::remove_dir_all(&dir)?;
    }
    let server = Server::bind(&address, Security::Plain, Arc::new(OnlyOne(lease)))?;
    println!("listening on {}", server.address());
    loop {
        std::thread::park();
    }
}
