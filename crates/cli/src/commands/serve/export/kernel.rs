//! `aquifer serve export --kernel`: the kernel's own NVMe target over zram or brd.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::process::{self, ExitCode};

use aquifer_blockdev::nvme::target::{Target, Wish};
use aquifer_blockdev::nvme::{Root, SubsystemUri, Transport};
use aquifer_nvme::proto::Nqn;
use aquifer_page::Bytes;
use aquifer_transport::Address;
use serde::Serialize;
use signal_hook::iterator::Signals;

use super::Export;
use super::nvme::NvmeOptions;
use crate::commands::Common;
use crate::commands::volume::direct_failure;
use crate::failure::{Failure, OrFail, Result};
use crate::output;

/// The answer of `aquifer serve export --kernel` when hosts can connect.
#[derive(Debug, Serialize)]
struct Ready {
    /// For 'aquifer volume attach --direct'.
    uris: Vec<SubsystemUri>,
    nqn: Nqn,
    /// The RAM disk.
    device: PathBuf,
    capacity: Bytes,
    pid: u32,
}

impl Ready {
    fn to_text(&self) -> String {
        let uris: Vec<_> = self.uris.iter().map(ToString::to_string).collect();
        format!("exporting {} of {} at {}", self.capacity, self.device.display(), uris.join(" "))
    }
}

/// Sets up the kernel's target and waits until a signal ends it.
pub(super) fn run(export: &Export, common: &Common, mut signals: Signals) -> Result<ExitCode> {
    let what = format!("exporting {} with the kernel's target", export.size);
    let fail = |error| direct_failure(&what, error);
    let ports = ports(&export.nvme, &what)?;
    let allowed = export.nvme.allowed_hosts.clone();
    let (capacity, quota) = (export.size, export.quota);
    let wish = Wish { name: None, capacity, quota, ports: ports.clone(), allowed, secrets: None };
    let target = Target::make(&Root::default(), &wish).map_err(fail)?;
    if target.keeps_ram() {
        let why = "brd does not free its RAM when this export ends";
        Failure::new(&what, why)
            .help("'modprobe zram' before an export, or 'modprobe -r brd' after it")
            .warn(common.json);
    }
    let uri = |(transport, at): &(Transport, SocketAddr)| SubsystemUri {
        transport: *transport,
        host: at.ip().to_string(),
        port: at.port(),
        nqn: target.nqn().clone(),
    };
    let ready = Ready {
        uris: ports.iter().map(uri).collect(),
        nqn: target.nqn().clone(),
        device: target.device(),
        capacity: target.capacity(),
        pid: process::id(),
    };
    output::answer(common.json, &ready, Ready::to_text)?;
    signals.forever().next();
    target
        .remove()
        .map(|()| ExitCode::SUCCESS)
        .map_err(|error| direct_failure("removing the export", error))
}

/// Returns where the kernel listens: over TCP, and with --rdma also over RDMA.
fn ports(nvme: &NvmeOptions, what: &str) -> Result<Vec<(Transport, SocketAddr)>> {
    let mut ports = Vec::new();
    for address in &nvme.addresses {
        let Address::Tcp { host, port } = address else {
            return Err(Failure::new(what, "the kernel cannot listen on a unix socket")
                .help("give HOST:PORT with --nvme"));
        };
        if *port == 0 {
            return Err(Failure::new(what, "the kernel cannot choose a free port")
                .help("write a port other than 0, usually 4420"));
        }
        if nvme.allowed_hosts.is_empty() && !address.is_local() {
            let why = "any user of any other host could reach it";
            return Err(Failure::new(format!("listening on {address}"), why)
                .help("add --allow-host NQN (on a trusted network), or use a loopback address"));
        }
        let mut found =
            (host.as_str(), *port).to_socket_addrs().or_fail(|| format!("looking up {host}"))?;
        let Some(at) = found.next() else {
            return Err(Failure::new(format!("looking up {host}"), "it has no address"));
        };
        ports.push((Transport::Tcp, at));
        if nvme.rdma {
            ports.push((Transport::Rdma, at));
        }
    }
    Ok(ports)
}
