//! `aquifer attach`.

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

use super::Common;
use crate::failure::{Failure, OrFail as _, Result};
use crate::lender::{Lender, Purpose, Trust};
use crate::lender_uri::LenderUri;
use crate::manual::Manual;
use crate::output;
use crate::io_timeout::{self, IoTimeout};
use crate::volumes::{Owner, PRIORITY, Volumes, Wish};

/// Makes a block device of an NBD export or an NVMe namespace, and swap if asked
///
/// A process of its own serves the device until it is detached; it keeps the rules of the swap path (locked memory,
/// spared by the OOM killer, never waiting for memory itself). With --direct there is no process: the kernel's own NVMe
/// initiator goes straight to one lender. Prints the device.
#[derive(Debug, Args)]
pub struct Attach {
    /// What to use: nbd://HOST:PORT/NAME, nbds:// for TLS, nbd+unix:///NAME?socket=PATH, nvme+tcp://HOST:PORT/NQN, with
    /// --direct also nvme+rdma://HOST:PORT/NQN
    uri: Lent,
    /// Use only this much of it
    #[arg(long, value_name = "SIZE", conflicts_with = "direct")]
    size: Option<Bytes>,
    /// Swap to it
    #[arg(long)]
    swap: bool,
    /// Swap priority, 0 to 32767; the kernel fills devices with high ones first
    #[arg(long, value_name = "N", requires = "swap", default_value_t = PRIORITY,
        value_parser = clap::value_parser!(u16).range(0..=i64::from(aquifer_blockdev::swap::MAX_PRIORITY)))]
    priority: u16,
    /// How it becomes a block device: auto, ublk, nbd or fuse-loop
    #[arg(long, value_name = "KIND", default_value = "auto", value_parser = backend,
        conflicts_with = "direct")]
    backend: BackendKind,
    /// How long I/O waits for a lender that does not answer, in whole seconds, or 'forever'
    ///
    /// Then it fails. A volume waits for a day at most; with --direct the kernel can wait without
    /// end.
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
            "aquifer attach 'nbd+unix:///?socket=/run/aquifer/export.sock' --swap",
            "Swap to 'aquifer export' on this host",
        ),
        (
            "aquifer attach nbds://b.example.org/ --tls /etc/aquifer/tls --swap",
            "Swap to host b's memory",
        ),
        (
            "aquifer attach nvme+tcp://10.0.0.2:4420/nqn.2014-08.org.nvmexpress:uuid:... --dhchap-secret /etc/aquifer/secret",
            "The first namespace of an NVMe/TCP target, ours or any other",
        ),
        ("dev=$(aquifer attach nbd://127.0.0.1:10809/)", "Only a block device"),
        (
            "aquifer attach --direct nvme+tcp://192.0.2.1:4420/NQN --swap",
            "Swap to an NVMe subsystem, by the kernel alone",
        ),
    ],
    notes: &[
        (
            "What is kept",
            "The device uses whole extents of 64MiB of the export, in an order of its own: what was in the export before is \
             not seen, and what is written cannot be read by another program from there. An export serves one \
             volume. Detaching gives its memory back.",
        ),
        (
            "When the lender does not answer",
            "I/O waits for --io-timeout for it to come back; after that it fails, which for swap means a bus error in the program \
             whose page it was. It works again as soon as the lender does.",
        ),
        (
            "Security",
            "With nbds both sides prove who they are by certificates of the cluster, and pages cross the network encrypted. \
             With nbd:// and nvme+tcp:// to another host nobody on the way can read them, as pages are sealed before they leave \
             (unless --unsealed, and but for --direct), but anybody can change them; with --dhchap-secret the \
             host, and the lender if its secret is given too, at least prove who they are when they connect.",
        ),
        (
            "Direct",
            "The whole subsystem is the device. What was in it is seen, until --swap overwrites it; any number of hosts can \
             attach it, and ruin each other's pages: it is yours to see that one does. While the lender does not answer the \
             kernel tries again each second, without end; I/O waits for --io-timeout and then fails. \
             The device outlives every process; 'aquifer detach' finds it by the names of subsystem and host.",
        ),
        (
            "Networks that hang",
            "The kernel needs memory to receive the lender's answers. With frames of more than 1500 bytes and \
             vm.min_free_kbytes below 16384, hosts that had run out of memory were seen to hang; --direct --swap refuses such a \
             network, unless there is --force.",
        ),
    ],
    files: &[
        ("/run/aquifer/volumes/ID.sock", "the volume's control socket"),
        ("/run/aquifer/volumes/ID.log", "what its process had to say"),
        ("/run/aquifer/direct/ID.json", "what was attached with --direct, for 'aquifer detach'"),
        ("/etc/nvme/hostnqn", "who this host says it is to NVMe lenders, and hostid beside it"),
    ],
    see_also: &[
        "aquifer-detach(1)",
        "aquifer-export(1)",
        "aquifer-doctor(1)",
        "swapon(8)",
        "nvme-connect(1)",
    ],
    ..Manual::NONE
};

/// The answer of `aquifer attach`.
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
            let uri = self.uri.subsystem()?;
            return self.direct.run(common, uri, swap, self.io_timeout, &self.trust);
        }
        match &self.uri {
            Lent::Served(uri) => self.serve(common, uri),
            Lent::Rdma(uri) => {
                Err(Failure::new(format!("attaching {uri}"), "only the kernel speaks RDMA")
                    .help("give --direct, or nvme+tcp://"))
            }
        }
    }

    /// Attaches by a volume process.
    fn serve(&self, common: &Common, uri: &LenderUri) -> Result<ExitCode> {
        if !uri.is_secure() && !uri.address().is_local() {
            let can = if self.trust.unsealed {
                "read and change what goes there"
            } else {
                "change what goes there"
            };
            let why = format!("{uri} is not protected: anybody on the way can {can}");
            Failure::new("warning", why).help("use nbds:// with --tls").report(common.json);
        }
        let lender = Lender::find(uri, &self.trust, self.size, Purpose::Volume("attach"))?;
        let swap = self.swap.then_some(self.priority);
        let wish = Wish { backend: self.backend, swap, io_timeout: self.io_timeout.of_volume() };
        // If this program ends before `keep`, the volume's process takes the volume away.
        let started = Volumes::under(&common.run_dir)?.start(&lender, wish, Owner::Attach)?;
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
        started.keep().or_fail(|| format!("attaching {uri}"))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Parses a backend's name as configurations spell it.
fn backend(text: &str) -> Result<BackendKind, ValueError> {
    let text: StrDeserializer<'_, ValueError> = text.into_deserializer();
    BackendKind::deserialize(text)
}
