//! Server of one elastic lease over NVMe/TCP:
//! `nvme_memory ADDRESS SIZE [STORE_DIR [SECRET [CONTROLLER_SECRET]]]`.
//!
//! The server prints the subsystem's name: the environment variable SUBSYSTEM, or a name that stays
//! the same as long as STORE_DIR exists. A size on a line of standard input resizes the namespace.
//! The line `stored` prints how many bytes the namespace takes.

#[path = "../../nbd/examples/memory/mod.rs"]
mod memory;

use std::env;
use std::error::Error;
use std::io::BufRead;
use std::sync::Arc;

use aquifer_nvme::auth::Secrets;
use aquifer_nvme::proto::Nqn;
use aquifer_nvme::target::{Host, Limits, Namespace, Refused, Subsystems, Target};
use aquifer_transport::Address;
use aquifer_transport::serving::Connections;

/// The one lease, open to every host.
struct OnlyOne {
    subsystem: Nqn,
    namespace: Arc<Namespace>,
    secrets: Option<Secrets>,
}

impl Connections for OnlyOne {}

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
        return Err(
            "usage: nvme_memory ADDRESS SIZE [STORE_DIR [SECRET [CONTROLLER_SECRET]]]".into()
        );
    };
    let address: Address = address.parse()?;
    let lease = memory::lease(size.parse()?, args.next())?;
    let secrets = match args.next() {
        None => None,
        Some(host) => {
            let controller = args.next().map(|secret| secret.parse()).transpose()?;
            Some(Secrets { host: host.parse()?, controller })
        }
    };
    let subsystem = match env::var("SUBSYSTEM") {
        Ok(name) => name.parse()?,
        Err(_) => Nqn::of_lease(lease.id()),
    };
    let namespace = Arc::new(Namespace::new(lease));
    let only_one =
        OnlyOne { subsystem: subsystem.clone(), namespace: Arc::clone(&namespace), secrets };
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
