//! `aquifer export`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, ExitCode};
use std::sync::Arc;

use aquifer_fabric::nbd::server::{Exports, Peer, Refused, Security, Server};
use aquifer_fabric::tls::Identity;
use aquifer_fabric::{Address, Uri};
use aquifer_page::{Bytes, Group, HostName, LeaseId, PAGE_SIZE};
use aquifer_store::{Lease, LeaseRecord, Store};
use clap::Args;
use serde::Serialize;
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::Common;
use crate::failure::{Failure, OrFail, Result};
use crate::instance::Instance;
use crate::manual::Manual;
use crate::output;

/// Offers RAM of this host as an elastic network block device
///
/// A page takes RAM when something else than zeros is first written to it, and gives it back when it is discarded (trim)
/// or zeroed. Runs until it is stopped (^C, TERM), and then gives all of it back: nothing outlives it.
#[derive(Debug, Args)]
pub struct Export {
    /// The size of the device
    size: Bytes,
    /// Where to listen: unix:PATH or HOST:PORT; repeat for more
    ///
    /// Without --tls, TCP only on loopback. The default is unix:RUN_DIR/export.sock.
    #[arg(long = "nbd", value_name = "ADDRESS")]
    addresses: Vec<Address>,
    /// The export's name; it is the server's default export under any name
    #[arg(long, default_value = "")]
    name: String,
    /// A tmpfs directory for the pages
    ///
    /// The default is one of its own below /dev/shm/aquifer.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// The most RAM it may take, however large the device is; beyond it a write fails with 'no space'
    #[arg(long, value_name = "SIZE")]
    quota: Option<Bytes>,
    /// Demands mutual TLS on TCP, by the certificate in this directory (made by 'aquifer init')
    #[arg(long, value_name = "DIR")]
    tls: Option<PathBuf>,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer export 4G", "On the default unix socket"),
        ("aquifer export 4G --nbd unix:/tmp/a.sock --nbd 127.0.0.1:10809", "On two addresses of this host"),
        ("aquifer export 4G --nbd 192.0.2.1:10809 --tls /etc/aquifer/tls", "To the hosts of the cluster"),
        ("nbdinfo 'nbd+unix:///?socket=/run/aquifer/export.sock'", "Look at it with another program"),
    ],
    notes: &[
        (
            "Costs and limits",
            "A page that is stored costs its 4 KiB and a few bits. The size is a promise, not a reservation: if the tmpfs \
             or the host is out of memory before it is full, writes fail with 'no space'. The pages are locked in RAM.",
        ),
        (
            "Security",
            "A unix socket is for its owner only. On TCP, --tls admits every host that has a certificate of the cluster, \
             and nobody else; without --tls only loopback is served, to every user of this host.",
        ),
    ],
    files: &[
        ("/run/aquifer/export.sock", "the default socket"),
        ("/dev/shm/aquifer/export-PID", "the pages; what a killed export left is removed by the next one"),
    ],
    see_also: &["aquifer-attach(1)", "aquifer-run(1)", "nbdinfo(1)", "nbdcopy(1)"],
    ..Manual::NONE
};

/// What is told when clients can come.
#[derive(Debug, Serialize)]
struct Ready {
    /// The first of `uris`.
    uri: Uri,
    uris: Vec<Uri>,
    capacity: Bytes,
    pid: u32,
}

impl Export {
    /// Serves until a signal ends it.
    ///
    /// # Errors
    /// If it may not listen there, or cannot, or has no memory to offer.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let what = || format!("exporting {}", self.size);
        // Before anything is made, so that no signal can end this program without removing it again.
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).or_fail(what)?;
        let addresses = self.addresses(common)?;
        let marks = common.run_dir.join("exports");
        clean_up(&marks);
        let instance =
            Instance::claim(&marks, "export").or_fail(|| format!("leaving a mark in {}", marks.display()))?;
        let memory = Memory::make(&self, &instance)?;
        let exports = Arc::new(OneLease { name: self.name.clone(), lease: Arc::clone(&memory.lease) });
        let servers = self.listen(&addresses, exports)?;

        let uris: Vec<_> = servers.iter().map(|server| self.uri(server.address())).collect();
        if let Some(uri) = uris.first().cloned() {
            let ready = Ready { uri, uris, capacity: memory.lease.capacity(), pid: process::id() };
            output::answer(common.json, &ready, |ready| {
                let uris: Vec<_> = ready.uris.iter().map(ToString::to_string).collect();
                format!("exporting {} at {}", ready.capacity, uris.join(" "))
            })?;
        }
        signals.forever().next();
        // Clients first: nobody is told of pages that vanish under them.
        servers.into_iter().for_each(Server::shutdown);
        memory.remove().map(|()| ExitCode::SUCCESS)
    }

    fn addresses(&self, common: &Common) -> Result<Vec<Address>> {
        if self.addresses.is_empty() {
            fs::create_dir_all(&common.run_dir).or_fail(|| format!("making {}", common.run_dir.display()))?;
            return Ok(vec![Address::Unix(common.run_dir.join("export.sock"))]);
        }
        match self.addresses.iter().find(|address| self.tls.is_none() && !address.is_local()) {
            Some(address) => {
                let why = "other hosts could reach it, and without TLS everybody on them";
                Err(Failure::new(format!("listening on {address}"), why).help(
                    "give --tls DIR with a certificate made by 'aquifer init', or a loopback or unix address",
                ))
            }
            None => Ok(self.addresses.clone()),
        }
    }

    fn listen(&self, addresses: &[Address], exports: Arc<OneLease>) -> Result<Vec<Server>> {
        let identity = self.tls.as_deref().map(Identity::load).transpose();
        let identity = identity.or_fail(|| "reading the certificate")?;
        let listen = |address: &Address| {
            let security = match (&identity, address) {
                (Some(identity), Address::Tcp { .. }) => Security::Tls(identity.server_config()),
                _ => Security::Plain,
            };
            Server::bind(address, security, exports.clone())
                .or_fail(|| format!("exporting {}", self.size))
                .map_err(|failure| {
                    failure.help("give another address by --nbd, or stop the program that has this one")
                })
        };
        addresses.iter().map(listen).collect()
    }

    fn uri(&self, address: &Address) -> Uri {
        let secure = self.tls.is_some() && matches!(address, Address::Tcp { .. });
        Uri { secure, address: address.clone(), export: self.name.clone() }
    }
}

/// One lease for everybody who gets as far as asking.
struct OneLease {
    name: String,
    lease: Arc<Lease>,
}

impl Exports for OneLease {
    fn open(&self, name: &str, _peer: &Peer) -> Result<Arc<Lease>, Refused> {
        if name.is_empty() || name == self.name {
            Ok(Arc::clone(&self.lease))
        } else {
            Err(Refused::Unknown(name.to_owned()))
        }
    }

    fn list(&self, _peer: &Peer) -> Vec<String> {
        vec![self.name.clone()]
    }
}

/// The pages, which are gone when this is dropped.
struct Memory {
    store: Store,
    lease: Arc<Lease>,
    /// The directory to remove: only one of its own.
    own_dir: Option<PathBuf>,
}

impl Memory {
    fn make(export: &Export, instance: &Instance) -> Result<Self> {
        let what = || format!("exporting {}", export.size);
        let own_dir = Path::new("/dev/shm/aquifer").join(instance.name());
        let dir = export.dir.clone().unwrap_or_else(|| own_dir.clone());
        let own_dir = export.dir.is_none().then_some(own_dir);
        if let Some(own) = &own_dir {
            instance.note(&own.to_string_lossy()).or_fail(what)?;
        }
        let store = Store::open(&dir).or_fail(what)?;
        if !store.leases().is_empty() {
            let why = format!("{} holds leases of an agent", dir.display());
            return Err(Failure::new(what(), why).help("give another directory by --dir"));
        }
        let capacity = Bytes(export.size.pages() * PAGE_SIZE as u64);
        let record = LeaseRecord {
            id: LeaseId::random(),
            borrower: HostName::try_from("export".to_owned()).or_fail(what)?,
            group: Group::default(),
            capacity,
            quota: export.quota.unwrap_or(capacity),
            note: serde_json::Value::Null,
        };
        let lease = store.create(record).or_fail(what)?;
        if store.is_swappable() {
            let why = "the kernel does not let this user lock enough memory: what is stored here may be swapped out";
            Failure::new("warning", why).help("run as root, or raise RLIMIT_MEMLOCK").report(false);
        }
        Ok(Self { store, lease, own_dir })
    }

    fn remove(mut self) -> Result<()> {
        self.remove_all().or_fail(|| "giving the memory back")
    }

    fn remove_all(&mut self) -> Result<(), aquifer_store::StoreError> {
        if self.store.get(self.lease.id()).is_some() {
            self.store.remove(self.lease.id())?;
        }
        if let Some(dir) = self.own_dir.take() {
            remove_dir(&dir);
        }
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // Nobody is left to tell; the next export removes what is left.
        let _ = self.remove_all();
    }
}

/// Removes what exports that were killed left.
fn clean_up(marks: &Path) {
    for dead in Instance::dead(marks, "export").unwrap_or_default() {
        if let Ok(dir) = dead.read_note() {
            remove_dir(Path::new(&dir));
        }
    }
}

/// Removes an export's own directory. Only below /dev/shm: a note is a file that somebody may have written to.
fn remove_dir(dir: &Path) {
    let own = dir.parent() == Some(Path::new("/dev/shm/aquifer"))
        && dir.file_name().is_some_and(|name| name.to_string_lossy().starts_with("export-"));
    if own
        && let Err(error) = fs::remove_dir_all(dir)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        Failure::new(format!("removing {}", dir.display()), error).report(false);
    }
}
