//! `aquifer export`.

mod kernel;
mod memory;
mod nbd;
mod nvme;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::{self, ExitCode};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use aquifer_fabric::nbd::server::Server;
use aquifer_fabric::nvme::proto::Nqn;
use aquifer_fabric::{Address, Uri};
use aquifer_page::Bytes;
use aquifer_store::{SharedUsage, Store, Usage};
use clap::Args;
use serde::Serialize;
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::Common;
use memory::{Memory, clean_up};
use nbd::Leases;
use nvme::Nvme;

use crate::failure::{Failure, OrFail, Result};
use crate::instance::Instance;
use crate::listening;
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
    /// Without --tls, TCP only on loopback. The default is unix:RUN_DIR/export.sock, unless there is --nvme.
    #[arg(long = "nbd", value_name = "ADDRESS")]
    addresses: Vec<Address>,
    /// Where to listen for NVMe/TCP: HOST:PORT (4420 is the usual port) or unix:PATH; repeat for more
    ///
    /// Without --dhchap-secret, TCP only on loopback. The subsystem has one namespace with blocks of 4 KiB.
    #[arg(long = "nvme", value_name = "ADDRESS")]
    nvme_addresses: Vec<Address>,
    /// Has the kernel itself serve NVMe, from a zram device: no process on the way of a page
    #[arg(long, requires = "nvme_addresses", conflicts_with_all = ["addresses", "secrets", "names", "dir", "tls"])]
    kernel: bool,
    /// With --kernel: also over RDMA, at the same addresses
    #[arg(long, requires = "kernel")]
    rdma: bool,
    /// A host that may connect over NVMe, by its NQN (see /etc/nvme/hostnqn); repeat for more
    ///
    /// Without it every host may that reaches the address.
    #[arg(long = "allow-host", value_name = "NQN", requires = "nvme_addresses")]
    allowed_hosts: Vec<Nqn>,
    /// Lets NVMe hosts in only if they know the secret in this file (made by 'nvme gen-dhchap-key'); a second line is the
    /// secret by which hosts can ask this end to prove itself
    ///
    /// With it --nvme may be an address that other hosts reach. What travels is as the other host sends it: sealed, if that is Aquifer's.
    #[arg(long = "dhchap-secret", value_name = "FILE", requires = "nvme_addresses")]
    secrets: Option<PathBuf>,
    /// The export's name; one is the server's default export. Repeat for more: each is a device of its own, of this size, and asked for by its name
    #[arg(long = "name", value_name = "NAME", default_value = "")]
    names: Vec<String>,
    /// Keeps one copy of equal pages of all its devices, for borrowers of one group (see 'aquifer group')
    ///
    /// Found by a keyed fingerprint, compared byte by byte, and parted again when one is written. Pages that are sealed under different keys are never equal. Names keep out mistakes, not hosts: --tls admits every host of the cluster to all.
    #[arg(long, conflicts_with = "kernel")]
    share: bool,
    /// Says now and then what it has: an object a line, with --json
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, conflicts_with = "kernel")]
    report: Option<Duration>,
    /// A tmpfs directory for the pages
    ///
    /// The default is one of its own below /dev/shm/aquifer, or of another user than root below $XDG_RUNTIME_DIR/aquifer. What
    /// an export that was killed has left in this one is served again, if all else that was asked for is the same. The
    /// directory and those above it must be root's or this user's, and nobody else may write there; a directory above it may
    /// be sticky, as /dev/shm is.
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
        (
            "aquifer export 4G --nbd unix:/tmp/a.sock --nbd 127.0.0.1:10809",
            "On two addresses of this host",
        ),
        (
            "aquifer export 4G --nbd 192.0.2.1:10809 --tls /etc/aquifer/tls",
            "To the hosts of the cluster",
        ),
        (
            "aquifer export 4G --nvme 127.0.0.1:4420",
            "As an NVMe subsystem, for 'nvme connect-all -t tcp -a 127.0.0.1'",
        ),
        (
            "aquifer export 4G --nvme 192.0.2.1:4420 --dhchap-secret FILE",
            "To hosts that know a secret, over a network you trust",
        ),
        (
            "aquifer export 4G --kernel --nvme 192.0.2.1:4420 --rdma --allow-host NQN",
            "By the kernel's own target, over TCP and RDMA",
        ),
        (
            "aquifer export 8G --nbd 192.0.2.1:10809 --tls /etc/aquifer/tls --name a --name b --share",
            "Two devices for two hosts of one group: what VMs on both have in common is kept once",
        ),
        (
            "nbdinfo 'nbd+unix:///?socket=/run/aquifer/export.sock'",
            "Look at it with another program",
        ),
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
             and nobody else; without --tls only loopback is served, to every user of this host. Over NVMe/TCP \
             --dhchap-secret admits who knows the secret, but what travels can be read by whoever sees the network; without \
             it a host is who it says it is, and --allow-host keeps out mistakes, not malice.",
        ),
        (
            "By the kernel",
            "With --kernel pages are in a zram device, compressed, under the kernel's NVMe target; --quota bounds the RAM that \
             they take. The NQN is a new one each time, so that no host takes a new export for the one that had its pages. \
             Where zram is missing a disk of brd is used, which gives no RAM back. The kernel serves on if this command is \
             killed; the next export with --kernel takes away what it left, which it knows by its NQN \
             (uuid:61717569-6665-8...), its port numbers (43264 to 43519) and its lock.",
        ),
    ],
    files: &[
        ("/run/aquifer/export.sock", "the default socket"),
        (
            "/dev/shm/aquifer/export-PID",
            "the pages without --dir, as root; what a killed export left is removed by the next one",
        ),
    ],
    see_also: &[
        "aquifer-attach(1)",
        "aquifer-run(1)",
        "nbdinfo(1)",
        "nbdcopy(1)",
        "nvme-connect(1)",
    ],
    ..Manual::NONE
};

/// The answer of `aquifer export` when clients can connect.
#[derive(Debug, Serialize)]
struct Ready {
    /// The first of `uris`.
    #[serde(skip_serializing_if = "Option::is_none")]
    uri: Option<Uri>,
    uris: Vec<Uri>,
    #[serde(skip_serializing_if = "Option::is_none")]
    nvme: Option<nvme::Ready>,
    capacity: Bytes,
    pid: u32,
}

impl Ready {
    fn to_text(&self) -> String {
        let uris: Vec<_> = self.uris.iter().map(ToString::to_string).collect();
        let nbd = (!uris.is_empty()).then(|| uris.join(" "));
        let nvme = self.nvme.as_ref().map(ToString::to_string);
        let places: Vec<_> = nbd.into_iter().chain(nvme).collect();
        format!("exporting {} at {}", self.capacity, places.join(" and "))
    }
}

impl Export {
    /// Serves until a signal ends it.
    ///
    /// # Errors
    /// If it may not or cannot listen at an address, or if it has no memory to offer.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let what = || format!("exporting {}", self.size);
        // Registered first, so that no signal can end this program and leave pages behind.
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).or_fail(what)?;
        if self.kernel {
            return kernel::run(&self, common, signals);
        }
        let addresses = self.addresses(common)?;
        let marks = common.run_dir.join("exports");
        clean_up(&marks);
        let mut instance = Instance::claim(&marks, "export")
            .or_fail(|| format!("leaving a mark in {}", marks.display()))?;
        if self.names.len() > 1 && !self.nvme_addresses.is_empty() {
            let why = "over NVMe there is one device";
            return Err(
                Failure::new(what(), why).help("give one --name, or run it once for each device")
            );
        }
        let mut names = BTreeSet::new();
        if self.names.len() > 1
            && !self.names.iter().all(|name| !name.is_empty() && names.insert(name))
        {
            let why = "each of several devices needs a name of its own";
            return Err(Failure::new(what(), why).help("give each another --name"));
        }
        let memory = Memory::make(&self, &mut instance)?;
        let leases = self.names.iter().cloned().zip(memory.leases.iter().cloned()).collect();
        let servers = self.listen(&addresses, Arc::new(Leases(leases)))?;

        let nvme = memory.leases.first().map_or(Ok(None), |lease| Nvme::listen(&self, lease))?;

        let uris: Vec<_> = servers
            .iter()
            .flat_map(|server| self.names.iter().map(|name| self.uri(server.address(), name)))
            .collect();
        let ready = Ready {
            uri: uris.first().cloned(),
            uris,
            nvme: nvme.as_ref().map(Nvme::ready),
            capacity: memory.capacity,
            pid: process::id(),
        };
        output::answer(common.json, &ready, Ready::to_text)?;
        if let Some(every) = self.report {
            report(common.json, every, Arc::clone(&memory.store)).or_fail(what)?;
        }
        signals.forever().next();
        // Servers first, so that no client sees its pages vanish.
        servers.into_iter().for_each(Server::shutdown);
        drop(nvme);
        memory.remove().map(|()| ExitCode::SUCCESS)
    }

    fn addresses(&self, common: &Common) -> Result<Vec<Address>> {
        if self.addresses.is_empty() && self.nvme_addresses.is_empty() {
            fs::create_dir_all(&common.run_dir)
                .or_fail(|| format!("making {}", common.run_dir.display()))?;
            return Ok(vec![Address::Unix(common.run_dir.join("export.sock"))]);
        }
        listening::check(&self.addresses, self.tls.as_deref())?;
        Ok(self.addresses.clone())
    }

    fn listen(&self, addresses: &[Address], exports: Arc<Leases>) -> Result<Vec<Server>> {
        let listen = |(address, security)| {
            Server::bind(&address, security, exports.clone())
                .or_fail(|| format!("exporting {}", self.size))
                .map_err(|failure| {
                    failure.help(
                        "give another address by --nbd, or stop the program that has this one",
                    )
                })
        };
        listening::security(addresses.to_vec(), self.tls.as_deref())?
            .into_iter()
            .map(listen)
            .collect()
    }

    fn uri(&self, address: &Address, name: &str) -> Uri {
        let secure = self.tls.is_some() && matches!(address, Address::Tcp { .. });
        Uri { secure, address: address.clone(), export: name.to_owned() }
    }
}

/// The usage of all leases of this export.
#[derive(Debug, Serialize)]
struct Report {
    /// Bytes that borrowers have stored.
    stored: Bytes,
    /// RAM that they take, in bytes.
    taken: Bytes,
    /// RAM that sharing saves, in bytes.
    saved: Bytes,
    /// Frames that more than one page refers to.
    shared_frames: u64,
    /// Writes that unshared a page (copy-on-write).
    breaks: u64,
}

impl Report {
    fn of(usage: &Usage) -> Self {
        let sum = |of: fn(&SharedUsage) -> u64| {
            usage.groups.values().map(|group| of(&group.shared)).sum()
        };
        Self {
            stored: usage.stored,
            taken: usage.taken,
            saved: Bytes(sum(|shared| shared.saved.0)),
            shared_frames: sum(|shared| shared.shared_frames),
            breaks: sum(|shared| shared.breaks),
        }
    }

    fn to_text(&self) -> String {
        let Self { stored, taken, saved, breaks, .. } = self;
        format!(
            "{stored} stored in {taken} of RAM; sharing saves {saved}, {breaks} pages parted again"
        )
    }
}

/// The shortest time between two reports.
const SHORTEST_REPORT: Duration = Duration::from_millis(10);

/// Reports as long as this process lives, on a thread of its own.
fn report(json: bool, every: Duration, store: Arc<Store>) -> io::Result<()> {
    let telling = move || {
        loop {
            thread::sleep(every.max(SHORTEST_REPORT));
            if output::answer(json, &Report::of(&store.usage()), Report::to_text).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().name("report".to_owned()).spawn(telling).map(drop)
}
