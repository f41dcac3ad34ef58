//! `aquifer serve export`.

mod kernel;
mod limits;
mod memory;
mod nbd;
mod nvme;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::{self, ExitCode};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use aquifer_nbd::Uri;
use aquifer_nbd::server::Server;
use aquifer_page::Bytes;
use aquifer_store::{SharedUsage, Store, Usage};
use aquifer_transport::Address;
use clap::Args;
use serde::Serialize;
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::claim::{Claimed, Overcommit};
use crate::commands::Common;
use limits::LimitOptions;
use memory::{ExportMemory, clean_up};
use nbd::Leases;
use nvme::{Nvme, NvmeOptions};

use crate::failure::{Failure, OrFail, Result};
use crate::instance::Instance;
use crate::listening;
use crate::manual::Manual;
use crate::output;

/// Lend RAM of this host as a network block device
///
/// A page takes RAM when a client first writes content to it. It frees that RAM when a client
/// discards (trims) or zeroes it. The export runs until it is stopped (^C, TERM). It then frees all
/// RAM and discards its pages.
#[derive(Debug, Args)]
pub struct Export {
    /// Size of the device, rounded up to whole pages of 4 KiB
    #[arg(long, value_name = "SIZE")]
    size: Bytes,
    /// NBD address: unix:PATH or HOST:PORT; repeat for more
    ///
    /// TCP needs --tls unless it is loopback. The default is unix:RUN_DIR/export.sock, or none with
    /// --nvme.
    #[arg(long = "nbd", value_name = "ADDRESS")]
    addresses: Vec<Address>,
    #[command(flatten)]
    nvme: NvmeOptions,
    /// Name of the export; repeat for more devices of this size
    ///
    /// A single export is also the server's default export. With several, clients choose by name;
    /// NVMe serves only one.
    #[arg(long = "name", value_name = "NAME", default_value = "")]
    names: Vec<String>,
    /// Store equal pages of all its devices once
    ///
    /// Use it for borrowers of one group (see 'aquifer group'). Pages match by a keyed fingerprint
    /// and a comparison of every byte; a write unshares a page. Pages encrypted under different
    /// keys never match. --tls admits every host of the cluster to all devices; names only prevent
    /// mistakes.
    #[arg(long, conflicts_with = "kernel")]
    share: bool,
    /// Print usage at this interval, with --json one object a line
    ///
    /// By default the export prints nothing after its addresses.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration,
        conflicts_with = "kernel")]
    report: Option<Duration>,
    /// Directory on a tmpfs for the pages
    ///
    /// The default is a new directory in /dev/shm/aquifer, or for users other than root in
    /// $XDG_RUNTIME_DIR/aquifer. In a directory given here, an export serves the pages that a
    /// killed export with the same arguments left. The directory and its parents must belong to
    /// root or to this user, and nobody else may write there. A parent may be sticky, as /dev/shm
    /// is.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Maximum RAM to use; beyond it, writes fail with 'no space'
    ///
    /// The default is the size of the device.
    #[arg(long, value_name = "SIZE")]
    quota: Option<Bytes>,
    #[command(flatten)]
    limits: LimitOptions,
    #[command(flatten)]
    overcommit: Overcommit,
    /// Require mutual TLS on --nbd over TCP, with DIR's certificate
    ///
    /// 'aquifer cluster create' or 'join' makes it. Default: no TLS, and --nbd over TCP only on
    /// loopback. NVMe has no TLS.
    #[arg(long, value_name = "DIR")]
    tls: Option<PathBuf>,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer serve export --size 4G", "Serve on the default unix socket"),
        (
            "aquifer serve export --size 4G --nbd unix:/tmp/a.sock --nbd 127.0.0.1:10809",
            "Serve on two addresses of this host",
        ),
        (
            "aquifer serve export --size 4G --nbd 192.0.2.1:10809 --tls /etc/aquifer/tls",
            "Serve the hosts of the cluster",
        ),
        (
            "aquifer serve export --size 4G --nvme 127.0.0.1:4420",
            "Serve NVMe, for 'nvme connect-all -t tcp -a 127.0.0.1 -s 4420'",
        ),
        (
            "aquifer serve export --size 4G --nvme 192.0.2.1:4420 --dhchap-secret FILE",
            "Serve hosts that know a secret, over a trusted network",
        ),
        (
            "aquifer serve export --size 4G --kernel --nvme 192.0.2.1:4420 --rdma --allow-host NQN",
            "Serve with the kernel's own target, over TCP and RDMA",
        ),
        (
            "aquifer serve export --size 8G --nbd 192.0.2.1:10809 --tls DIR \
             --name a --name b --share",
            "Serve two hosts of one group and store equal pages once",
        ),
        (
            "nbdinfo 'nbd+unix:///?socket=/run/aquifer/export.sock'",
            "Inspect the export with another program",
        ),
    ],
    notes: &[
        (
            "Costs and limits",
            "A stored page costs its 4 KiB and a few bits. The size is a promise, not a \
             reservation: if the tmpfs or the host runs out of memory first, writes fail with 'no \
             space'. The pages are locked in RAM. This host's agent, if one runs, refuses new \
             pages for which it has no room (see --overcommit).",
        ),
        (
            "Protection",
            "Only its owner can use a unix socket. For NBD over TCP, --tls admits every host with \
             a certificate of the cluster, and no other. Without --tls, it is served on loopback \
             only, to every user of this host. Over NVMe/TCP, --dhchap-secret admits hosts that \
             know the secret, but does not encrypt the traffic. Without it a host's NQN is not \
             checked: --allow-host prevents mistakes, not attacks.",
        ),
        (
            "Kernel target",
            "With --kernel, pages are compressed in a zram device under the kernel's NVMe target. \
             --quota limits their RAM. Each export has a new NQN, so that no host mistakes it for \
             an earlier export that held its pages. Without zram it uses a brd disk, which never \
             frees RAM. If this command is killed, the kernel keeps serving. The next export with \
             --kernel removes the leftovers. It recognizes them by NQN \
             (uuid:61717569-6665-8...), port number (43264 to 43519) and lock. \
             This host's agent counts the RAM that it takes, but not its size.",
        ),
    ],
    files: &[
        ("/run/aquifer/export.sock", "the default socket"),
        (
            "/dev/shm/aquifer/export-PID-NUMBER",
            "root's pages without --dir; the next export removes leftovers",
        ),
    ],
    see_also: &[
        "aquifer-volume-attach(1)",
        "aquifer-run(1)",
        "nbdinfo(1)",
        "nbdcopy(1)",
        "nvme-connect(1)",
    ],
    ..Manual::NONE
};

/// The answer of `aquifer serve export` when clients can connect.
#[derive(Debug, Serialize)]
struct Ready {
    /// The first of `uris`.
    #[serde(skip_serializing_if = "Option::is_none")]
    uri: Option<Uri>,
    uris: Vec<Uri>,
    #[serde(skip_serializing_if = "Option::is_none")]
    nvme: Option<nvme::Ready>,
    capacity: Bytes,
    /// The directory of the pages, unless the user gave one.
    #[serde(skip_serializing_if = "Option::is_none")]
    dir: Option<PathBuf>,
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
        if self.nvme.kernel {
            return kernel::run(&self, common, signals);
        }
        let addresses = self.addresses(common)?;
        let marks = common.run_dir.join("exports");
        clean_up(&marks, common.json);
        let mut instance = Instance::claim(&marks, "export")
            .or_fail(|| format!("recording this export in {}", marks.display()))?;
        if self.names.len() > 1 && !self.nvme.addresses.is_empty() {
            let why = "an NVMe export has one device";
            return Err(
                Failure::new(what(), why).help("give one --name, or run it once for each device")
            );
        }
        let mut names = BTreeSet::new();
        if self.names.len() > 1
            && !self.names.iter().all(|name| !name.is_empty() && names.insert(name))
        {
            let why = "several devices need different names";
            return Err(Failure::new(what(), why).help("give each device its own --name"));
        }
        let gate = self.limits.gate(what)?;
        let (memory, claimed) = ExportMemory::make(&self, &mut instance, common)?;
        let leases = self.names.iter().cloned().zip(memory.leases.iter().cloned()).collect();
        let exports = Arc::new(Leases { leases, gate: Arc::clone(&gate) });
        let servers = self.listen(&addresses, exports)?;
        let first = memory.leases.first();
        let nvme = first.map_or(Ok(None), |lease| Nvme::listen(&self, lease, gate))?;

        let uris: Vec<_> = servers
            .iter()
            .flat_map(|server| self.names.iter().map(|name| self.uri(server.address(), name)))
            .collect();
        let ready = Ready {
            uri: uris.first().cloned(),
            uris,
            nvme: nvme.as_ref().map(Nvme::ready),
            capacity: memory.capacity,
            dir: memory.own_dir.clone(),
            pid: process::id(),
        };
        output::answer(common.json, &ready, Ready::to_text)?;
        claimed.into_iter().for_each(Claimed::keep);
        if let Some(every) = self.report {
            report(common.json, every, Arc::downgrade(&memory.store)).or_fail(what)?;
        }
        signals.forever().next();
        // Servers first, so that no client sees its pages vanish.
        servers.into_iter().for_each(Server::shutdown);
        drop(nvme);
        memory.remove().map(|()| ExitCode::SUCCESS)
    }

    fn addresses(&self, common: &Common) -> Result<Vec<Address>> {
        if self.addresses.is_empty() && self.nvme.addresses.is_empty() {
            fs::create_dir_all(&common.run_dir)
                .or_fail(|| format!("creating {}", common.run_dir.display()))?;
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
                        "use another address with --nbd, or stop the program that uses this one",
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
struct ExportReport {
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

impl ExportReport {
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
        format!("{stored} stored in {taken} of RAM; sharing saves {saved}, {breaks} pages unshared")
    }
}

/// The shortest time between two reports.
const SHORTEST_REPORT: Duration = Duration::from_millis(10);

/// Reports as long as the store lives, on a thread of its own.
fn report(json: bool, every: Duration, store: Weak<Store>) -> io::Result<()> {
    let telling = move || {
        loop {
            thread::sleep(every.max(SHORTEST_REPORT));
            let Some(store) = store.upgrade() else { return };
            let report = ExportReport::of(&store.usage());
            drop(store);
            if output::answer(json, &report, ExportReport::to_text).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().name("report".to_owned()).spawn(telling).map(drop)
}
