//! `aquifer volume attach`.

mod direct;
mod lent;

use std::process::ExitCode;

use aquifer_blockdev::BackendKind;
use aquifer_page::{Bytes, VolumeId};
use clap::Args;
use serde::Serialize;
use serde::de::value::{Error as ValueError, StrDeserializer};
use serde::de::{Deserialize as _, IntoDeserializer as _};

use direct::Direct;
pub(crate) use direct::failure as direct_failure;
use lent::Lent;

use crate::commands::Common;
use crate::failure::{Failure, OrFail as _, Result};
use crate::io_timeout::{self, IoTimeout};
use crate::lender::{ClaimedLender, Purpose, Trust};
use crate::lender_uri::LenderUri;
use crate::lenders::Lenders;
use crate::manual::Manual;
use crate::output;
use crate::volumes::{Owner, PRIORITY, Protection, Volumes, Wish};

/// Attach lent memory as a block device or as swap
///
/// The lender is an NBD export or an NVMe namespace. A dedicated process serves the device until
/// 'aquifer volume detach'. It locks its memory and is exempt from the OOM killer, so swap I/O
/// never waits for memory. Prints the device.
///
/// With --direct there is no such process: the kernel's NVMe initiator connects to the lender.
#[derive(Debug, Args)]
pub struct Attach {
    /// Lender: nbd://, nbds://, nbd+unix:// or nvme+tcp:// URI; more than one are used together
    ///
    /// Forms: nbd://HOST:PORT/NAME, nbds://HOST:PORT/NAME for TLS, nbd+unix:///NAME?socket=PATH,
    /// nvme+tcp://HOST:PORT/NQN, and with --direct also nvme+rdma://HOST:PORT/NQN.
    #[arg(value_name = "URI", required = true)]
    uris: Vec<Lent>,
    /// Copies of each page at the lenders
    ///
    /// With 'mirror', name lenders in pairs on different hosts: the second of each pair has a copy
    /// of what the first has. Each write goes to both. If one dies, I/O goes on with the other. The
    /// kernel's own initiator (--direct) writes to one lender only.
    #[arg(long, value_name = "KIND", default_value = "none", conflicts_with = "direct")]
    protection: Protection,
    /// Use at most this much of each export; default all
    #[arg(long, value_name = "SIZE", conflicts_with = "direct")]
    size: Option<Bytes>,
    /// Swap to the device
    #[arg(long)]
    swap: bool,
    /// Swap priority, 0 to 32767; the highest is used first
    #[arg(long, value_name = "N", requires = "swap", default_value_t = PRIORITY,
        value_parser = clap::value_parser!(u16)
            .range(0..=i64::from(aquifer_blockdev::swap::MAX_PRIORITY)))]
    priority: u16,
    /// Block device driver: auto, ublk, nbd or fuse-loop
    ///
    /// 'auto' tries each and takes the first that works on this host.
    #[arg(long, value_name = "KIND", default_value = "auto", value_parser = backend,
        conflicts_with = "direct")]
    backend: BackendKind,
    /// How long I/O waits for a silent lender, or 'forever'
    ///
    /// In whole seconds. After that, I/O fails, and a program that needs the page gets SIGBUS.
    /// 'forever' means one day, or no limit with --direct.
    #[arg(long, value_name = "TIME", default_value = "8s", value_parser = io_timeout::parse)]
    io_timeout: IoTimeout,
    #[command(flatten)]
    trust: Trust,
    #[command(flatten)]
    direct: Direct,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        (
            "aquifer volume attach 'nbd+unix:///?socket=/run/aquifer/export.sock' --swap",
            "Swap to 'aquifer serve export' on this host",
        ),
        (
            "aquifer volume attach nbds://b.example.org/ --tls /etc/aquifer/tls --swap",
            "Swap to host b's memory over TLS",
        ),
        (
            "aquifer volume attach nvme+tcp://192.0.2.2:4420/NQN \
             --dhchap-secret /etc/aquifer/secret",
            "Attach the first namespace of any NVMe/TCP target",
        ),
        (
            "aquifer volume attach nbds://b.example.org/ nbds://c.example.org/ \
             --protection mirror --tls /etc/aquifer/tls --swap",
            "Swap to two hosts at once: the pages outlive either of them",
        ),
        (
            "dev=$(aquifer volume attach nbd://127.0.0.1:10809/)",
            "Attach a block device without swap",
        ),
        (
            "aquifer volume attach nvme+tcp://192.0.2.1:4420/NQN --direct --swap",
            "Swap to an NVMe subsystem without a process of Aquifer's",
        ),
    ],
    notes: &[
        (
            "Content",
            "The device uses whole 64MiB extents of the export, in its own order. It does not show \
             what the export held before, and no other program can read the device's pages there. \
             An export serves one volume. Detaching frees the lender's memory.",
        ),
        (
            "When the lender does not answer",
            "I/O waits for --io-timeout and then fails. A program whose page is swapped out there \
             gets a bus error (SIGBUS). I/O works again as soon as the lender answers.",
        ),
        (
            "Protection",
            "With nbds:// both sides authenticate with certificates of the cluster, and TLS \
             encrypts the connection. With nbd:// and nvme+tcp:// this host encrypts pages before \
             they leave it, unless --unencrypted or --direct is given. An attacker on the network \
             can still change them. --dhchap-secret authenticates this host when it connects, and \
             the lender too if the file holds its secret.",
        ),
        (
            "Direct",
            "The device is the whole subsystem, with its current content until --swap overwrites \
             it. Nothing stops several hosts from attaching it and corrupting each other's pages: \
             attach it on one host only. While the lender is silent, the kernel tries to reconnect \
             every second, forever. I/O waits for --io-timeout and then fails. The device outlives \
             every process; 'aquifer volume detach' finds it by the NQNs of subsystem and host.",
        ),
        (
            "Networks that hang",
            "The kernel needs memory to receive the lender's answers. With frames over 1500 bytes \
             and vm.min_free_kbytes below 16384, a host that runs out of memory can hang. --direct \
             --swap refuses such a network unless --force is given.",
        ),
    ],
    files: &[
        ("/run/aquifer/volumes/ID.sock", "the volume's control socket"),
        ("/run/aquifer/volumes/ID.log", "the log of the volume's process"),
        (
            "/run/aquifer/direct/ID.json",
            "the record of a --direct device, for 'aquifer volume detach'",
        ),
        ("/etc/nvme/hostnqn", "this host's NVMe name; hostid is beside it"),
    ],
    see_also: &[
        "aquifer-volume-list(1)",
        "aquifer-volume-detach(1)",
        "aquifer-serve-export(1)",
        "aquifer-doctor(1)",
        "swapon(8)",
        "nvme-connect(1)",
    ],
    ..Manual::NONE
};

/// The answer of `aquifer volume attach`.
#[derive(Debug, Serialize)]
struct Attached {
    volume: VolumeId,
    device: String,
    backend: BackendKind,
    capacity: Bytes,
    swap: bool,
    pid: u32,
}

impl Attach {
    /// Attaches the volume and prints the device.
    ///
    /// # Errors
    /// If the export cannot be used, or no backend can make a device of it.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let swap = self.swap.then_some(self.priority);
        if self.direct.direct {
            let [uri] = &self.uris[..] else {
                let why = "the kernel's initiator makes one device of one subsystem";
                return Err(Failure::new("attaching with --direct", why).help("name one URI"));
            };
            let uri = uri.subsystem()?;
            return self.direct.run(common, uri, swap, self.io_timeout, &self.trust);
        }
        let served = |uri: &Lent| match uri {
            Lent::Served(uri) => Ok(uri.clone()),
            Lent::Rdma(uri) => {
                Err(Failure::new(format!("attaching {uri}"), "only the kernel speaks RDMA")
                    .help("add --direct, or use nvme+tcp://"))
            }
        };
        self.serve(common, &self.uris.iter().map(served).collect::<Result<Vec<_>>>()?)
    }

    /// Attaches by a volume process.
    fn serve(&self, common: &Common, uris: &[LenderUri]) -> Result<ExitCode> {
        for uri in uris.iter().filter(|uri| !uri.is_secure() && !uri.address().is_local()) {
            let can = if self.trust.unencrypted { "read and change pages" } else { "change pages" };
            let why = format!("the connection is not protected: anyone on its path can {can}");
            Failure::new(format!("attaching {uri}"), why)
                .help("use nbds:// with --tls")
                .warn(common.json);
        }
        let all: Vec<_> = uris.iter().map(ToString::to_string).collect();
        let what = format!("attaching {}", all.join(" and "));
        let find = |uri: &_| {
            ClaimedLender::find(uri, &self.trust, self.size, Purpose::Volume("volume attach"))
        };
        let mirror = self.protection == Protection::Mirror;
        let lenders = Lenders::find(&what, uris, mirror, find)?;
        let swap = self.swap.then_some(self.priority);
        let wish = Wish { backend: self.backend, swap, io_timeout: self.io_timeout.of_volume() };
        // If this program ends before `keep`, the volume's process takes the volume away.
        let started = Volumes::under(&common.run_dir)?.start(&lenders, wish, Owner::Attach)?;
        let record = started.record();
        let attached = Attached {
            volume: record.spec.volume,
            device: record.device.display().to_string(),
            backend: record.backend,
            capacity: record.spec.capacity,
            swap: record.spec.swap,
            pid: record.pid,
        };
        output::answer(common.json, &attached, |attached| attached.device.clone())?;
        started.keep().or_fail(|| what)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Parses a backend's name as configurations spell it.
fn backend(text: &str) -> Result<BackendKind, ValueError> {
    let text: StrDeserializer<'_, ValueError> = text.into_deserializer();
    BackendKind::deserialize(text)
}
