//! Leases with pages in zram devices, which the kernel's own NVMe target serves.
//!
//! No process of Aquifer is on a page's way, and the pages outlive the agent. A lease's id leads to
//! its zram device and target; a file beside names its borrower.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use aquifer_blockdev::nvme::target::{self, HostSecrets, Target, Wish};
use aquifer_blockdev::nvme::{Root, SubsystemUri, Transport};
use aquifer_nvme::proto::Nqn;
use aquifer_page::{Bytes, HostName, LeaseId, file, lock};
use aquifer_store::LeaseRecord;

use super::{Leases, connections, note};
use crate::config::Config;

/// Leases that the kernel serves.
#[derive(Debug)]
pub(super) struct KernelLeases {
    root: Root,
    /// Directory of files `LEASE.json`: the agent writes each before its lease and removes it
    /// after.
    records: PathBuf,
    ports: Vec<(Transport, SocketAddr)>,
    leases: Mutex<BTreeMap<LeaseId, (LeaseRecord, Target)>>,
}

impl KernelLeases {
    /// Finds the leases that the previous agent made.
    pub(super) fn open(config: &Config) -> Result<Self, String> {
        let records = config.state.join("lent");
        let fail = |error: io::Error| {
            format!("cannot keep records of leases in {}: {error}", records.display())
        };
        DirBuilder::new().recursive(true).mode(0o700).create(&records).map_err(fail)?;
        let transports =
            [Transport::Tcp, Transport::Rdma].into_iter().take(1 + usize::from(config.lend.rdma));
        let ports = transports.flat_map(|transport| Some((transport, config.lend.nvme?))).collect();
        let root = Root::default();
        if config.lend.enabled {
            target::check(&root)
                .map_err(|error| format!("[lend] backend = \"kernel\": {error}"))?;
        }
        let mut leases = BTreeMap::new();
        for entry in fs::read_dir(&records).map_err(fail)? {
            let path = entry.map_err(fail)?.path();
            let record = fs::read(&path).map_err(fail)?;
            // An incomplete record has no lease yet.
            let record = serde_json::from_slice::<LeaseRecord>(&record).ok();
            let target =
                record.as_ref().map(|record| Target::find(&root, &Nqn::of_lease(record.id)));
            match (record, target.transpose().map_err(|error| error.to_string())?.flatten()) {
                (Some(record), Some(target)) => drop(leases.insert(record.id, (record, target))),
                // The previous agent stopped before it made the target, or the host has rebooted.
                _ => fs::remove_file(&path).map_err(fail)?,
            }
        }
        Ok(Self { root, records, ports, leases: Mutex::new(leases) })
    }

    fn leases(&self) -> MutexGuard<'_, BTreeMap<LeaseId, (LeaseRecord, Target)>> {
        lock(&self.leases)
    }

    fn path(&self, lease: LeaseId) -> PathBuf {
        self.records.join(format!("{lease}.json"))
    }

    fn wish(&self, record: &LeaseRecord) -> Result<Wish, String> {
        let access = note(record)
            .and_then(|note| note.access)
            .ok_or("the lease's record does not say which host may use it")?;
        let secrets = access
            .secrets
            .map(|secrets| HostSecrets { host: secrets.borrower, target: secrets.lender });
        Ok(Wish {
            name: Some(Nqn::of_lease(record.id)),
            capacity: record.capacity,
            // The capacity is bound enough: incompressible pages take no more than that.
            quota: None,
            ports: self.ports.clone(),
            allowed: vec![access.host.parse().map_err(|error| format!("{error}"))?],
            secrets,
        })
    }
}

impl Leases for KernelLeases {
    fn place(&self) -> String {
        let port =
            |(transport, at): &(Transport, SocketAddr)| format!("NVMe over {transport} at {at}");
        format!(
            "{}, served by the kernel",
            self.ports.iter().map(port).collect::<Vec<_>>().join(", ")
        )
    }

    fn records(&self) -> Vec<LeaseRecord> {
        self.leases().values().map(|(record, _)| record.clone()).collect()
    }

    fn record(&self, lease: LeaseId) -> Option<LeaseRecord> {
        self.leases().get(&lease).map(|(record, _)| record.clone())
    }

    fn open(&self, record: LeaseRecord) -> Result<(), String> {
        let (path, wish) = (self.path(record.id), self.wish(&record)?);
        let fail = |error: io::Error| format!("cannot write {}: {error}", path.display());
        save(&path, &record).map_err(fail)?;
        match Target::make(&self.root, &wish) {
            Ok(target) => {
                self.leases().insert(record.id, (record, target));
                Ok(())
            }
            Err(error) => {
                // Without a lease the record means nothing.
                let _ = fs::remove_file(&path);
                Err(error.to_string())
            }
        }
    }

    fn give_to(&self, lease: LeaseId, _: HostName, _: serde_json::Value) -> Result<(), String> {
        Err(format!("the kernel serves lease {lease}, and cannot keep its former host out"))
    }

    fn can_move(&self) -> bool {
        false
    }

    fn remove(&self, lease: LeaseId) -> Result<(), String> {
        let Some((record, target)) = self.leases().remove(&lease) else { return Ok(()) };
        let stored = target.stored();
        if let Err(error) = target.remove() {
            // The next call, or the next agent, finds the target again.
            if let Ok(Some(target)) = Target::find(&self.root, &Nqn::of_lease(lease)) {
                self.leases().insert(lease, (record, target));
            }
            return Err(format!("{error}; the lease still uses {stored}"));
        }
        let path = self.path(lease);
        fs::remove_file(&path).map_err(|error| format!("cannot remove {}: {error}", path.display()))
    }

    fn uris(&self, record: &LeaseRecord) -> Vec<String> {
        let uri = |(transport, at): &(Transport, SocketAddr)| SubsystemUri {
            transport: *transport,
            host: at.ip().to_string(),
            port: at.port(),
            nqn: Nqn::of_lease(record.id),
        };
        self.ports.iter().map(|port| uri(port).to_string()).collect()
    }

    fn stored(&self) -> BTreeMap<LeaseId, Bytes> {
        self.leases().iter().map(|(lease, (_, target))| (*lease, target.stored())).collect()
    }

    fn connections(&self) -> Option<BTreeMap<LeaseId, u32>> {
        None
    }

    /// Returns all leases if one of their ports may have a connection. The kernel does not tell
    /// which lease a connection uses, and shows no connections over RDMA. An unneeded lease costs
    /// memory; a lease freed under a device costs pages.
    fn in_use(&self) -> Vec<LeaseId> {
        let is_used = |(transport, at): &(Transport, SocketAddr)| match transport {
            Transport::Tcp => connections::any(at.port()),
            Transport::Rdma => true,
        };
        match self.ports.iter().any(is_used) {
            true => self.leases().keys().copied().collect(),
            false => Vec::new(),
        }
    }
}

fn save(path: &Path, record: &LeaseRecord) -> io::Result<()> {
    file::replace(path, &serde_json::to_vec(record)?)
}
