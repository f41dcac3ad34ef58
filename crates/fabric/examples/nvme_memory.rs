//! Serves one elastic lease over NVMe/TCP until it is killed: `nvme_memory ADDRESS SIZE [STORE_DIR [SECRET
//! [CONTROLLER_SECRET]]]`.
//!
//! Prints the subsystem's name, which stays the same as long as STORE_DIR is there. While it runs, a line on standard
//! input with a size resizes the namespace, and `stored` says what it takes.

use std::error::Error;
use std::io::BufRead;
use std::path::PathBuf;
use std::sync::Arc;
use std::{env, fs, process};

use aquifer_fabric::Address;
use aquifer_fabric::nvme::auth::Secrets;
use aquifer_fabric::nvme::proto::Nqn;
use aquifer_fabric::nvme::target::{Host, Limits, Namespace, Refused, Subsystems, Target};
use aquifer_page::{Bytes, Group, LeaseId};
use aquifer_store::{LeaseRecord, Store};

/// One lease, for everybody.
struct OnlyOne {
    subsystem: Nqn,
    namespace: Arc<Namespace>,
    secrets: Option<Secrets>,
}

impl Subsystems for OnlyOne {
    fn open(&self, subsystem: &Nqn, _host: &Host) -> Result<Arc<Namespace>, Refused> {
        if *subsystem == self.subsystem {
            Ok(Arc::clone(&self.namespace))
        } else {
            Err(Refused::Unknown(subsystem.clone()))
        }
    }

    fn list(&self, _host: &Host) -> Vec<Nqn> {
        vec![self.subsystem.clone()]
    }

    fn secrets(&self, _subsystem: &Nqn, _host: &Host) -> Option<Secrets> {
        self.secrets.clone()
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let mut args = env::args().skip(1);
    let (Some(address), Some(size)) = (args.next(), args.next()) else {
        return Err("usage: nvme_memory ADDRESS SIZE [STORE_DIR]".into());
    };
    let address: Address = address.parse()?;
    let capacity: Bytes = size.parse()?;
    let own_dir = PathBuf::from(format!("/dev/shm/aquifer-example-{}", process::id()));
    let dir = args.next().map_or(own_dir, PathBuf::from);

    let secrets = match args.next() {
        None => None,
        Some(host) => {
            let controller = args.next().map(|secret| secret.parse()).transpose()?;
            Some(Secrets { host: host.parse()?, controller })
        }
    };

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
    let subsystem = Nqn::of_lease(lease.id());
    let namespace = Arc::new(Namespace::new(lease));
    let only_one = OnlyOne { subsystem: subsystem.clone(), namespace: Arc::clone(&namespace), secrets };
    let target = Target::new(Arc::new(only_one), Limits::default());
    let address = target.listen(&address, None)?;
    println!("listening on {address} as {subsystem}");
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        if line.trim() == "stored" {
            println!("{} stored", namespace.lease().stored().0);
        } else {
            namespace.resize(line.parse()?)?;
            println!("{} large", namespace.size());
        }
    }
    loop {
        std::thread::park();
    }
}
