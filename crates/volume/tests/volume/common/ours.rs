//! Aquifer's own lender in a process: the example `nbd_memory` or `nvme_memory` over a store that
//! outlives it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use aquifer_page::{Bytes, EXTENT_SIZE, Incarnation, LeaseId, OwnerId, PAGE_SIZE};
use aquifer_transport::Address;
use aquifer_volume::{Claim, Encryption, LeaseTarget, NvmeAccess, Protocol};
use tempfile::TempDir;

use super::example::example;
use super::freezing;
use super::wait_until;

/// The protocol of the lender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Nbd,
    Nvme,
}

pub struct OurLender {
    child: Child,
    kind: Kind,
    extents: u64,
    /// The subsystem's NQN; empty for NBD.
    name: String,
    /// The subsystem's NQN, if the test chooses it.
    fixed: Option<String>,
    /// The key of the encrypted leases.
    encryption: Encryption,
    dir: TempDir,
    /// The lender's pages, which outlive its process.
    store: PathBuf,
}

impl OurLender {
    pub fn start(extents: u64) -> Self {
        Self::start_kind(Kind::Nbd, extents)
    }

    pub fn start_kind(kind: Kind, extents: u64) -> Self {
        Self::start_as(kind, extents, None)
    }

    /// Starts a lender with a fixed subsystem NQN, which stays the same for a new store.
    pub fn start_named(name: &str, extents: u64) -> Self {
        Self::start_as(Kind::Nvme, extents, Some(name.to_owned()))
    }

    fn start_as(kind: Kind, extents: u64, fixed: Option<String>) -> Self {
        let dir = tempfile::Builder::new().prefix("aquifer-test-").tempdir().unwrap();
        // Below root's stores, because the kernel must not swap out their pages while the lender is
        // dead.
        let is_root = fs::metadata(dir.path()).unwrap().uid() == 0;
        let stores = Path::new(if is_root { "/dev/shm/aquifer" } else { "/dev/shm" });
        let store = stores.join(dir.path().file_name().unwrap());
        let (child, name) = spawn(kind, dir.path(), &store, extents, fixed.as_deref());
        let encryption = Encryption::random();
        let lender = Self { child, kind, extents, name, fixed, encryption, dir, store };
        lender.wait();
        lender
    }

    /// Returns a lease on all of the lender's memory. Leases with an odd number are encrypted.
    pub fn lease(&self, number: u128) -> LeaseTarget {
        let protocol = match self.kind {
            Kind::Nbd => Protocol::Nbd { export: String::new(), secure: false },
            Kind::Nvme => Protocol::Nvme(NvmeAccess {
                subsystem: self.name.parse().unwrap(),
                host: "nqn.2014-08.org.example:borrower".parse().unwrap(),
                secrets: None,
            }),
        };
        LeaseTarget {
            lease: LeaseId(number),
            lender: format!("lender-{number}").parse().unwrap(),
            address: self.address(),
            protocol,
            capacity: Bytes(self.extents * EXTENT_SIZE),
            encryption: (number % 2 == 1).then(|| self.encryption.clone()),
            claim: Some(Claim { owner: OwnerId(number), ..Claim::new("a test".to_owned(), false) }),
        }
    }

    pub fn address(&self) -> Address {
        Address::Unix(self.dir.path().join("nbd"))
    }

    /// Kills the process with `SIGKILL`.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn restart(&mut self) {
        (self.child, _) =
            spawn(self.kind, self.dir.path(), &self.store, self.extents, self.fixed.as_deref());
        self.wait();
    }

    /// Restarts the lender as after a reboot of its host: at the same address, with an empty store.
    pub fn restart_empty(&mut self) {
        fs::remove_dir_all(&self.store).unwrap();
        self.restart();
    }

    /// Stops the process: connections stay and no request gets an answer.
    pub fn freeze(&self) {
        freezing::freeze(&self.child);
    }

    /// Continues the process after [`freeze`](Self::freeze).
    pub fn thaw(&self) {
        freezing::thaw(&self.child);
    }

    fn wait(&self) {
        wait_until("the lender listens", || {
            UnixStream::connect(self.dir.path().join("nbd")).is_ok()
        });
    }

    /// Returns the file with the lender's pages.
    pub fn file(&self) -> PathBuf {
        self.pages().next().unwrap()
    }

    /// Returns the incarnation of the lender's pages.
    pub fn incarnation(&self) -> Incarnation {
        let file = self.pages().next().unwrap();
        file.file_stem().unwrap().to_str().unwrap().parse().unwrap()
    }

    /// Returns the RAM that the store takes, from the kernel's figures.
    pub fn ram(&self) -> Bytes {
        Bytes(self.pages().map(|file| fs::metadata(file).unwrap().blocks() * 512).sum())
    }

    /// Returns the pages in the store that are not zero, as root on the lender sees them.
    pub fn sees(&self) -> Vec<Vec<u8>> {
        let all = self.pages().flat_map(|file| fs::read(file).unwrap());
        let all: Vec<_> = all.collect();
        all.chunks(PAGE_SIZE)
            .filter(|page| page.iter().any(|byte| *byte != 0))
            .map(<[u8]>::to_vec)
            .collect()
    }

    fn pages(&self) -> impl Iterator<Item = PathBuf> + use<> {
        let files = fs::read_dir(&self.store).unwrap().map(|entry| entry.unwrap().path());
        files.filter(|file| file.extension().is_some_and(|kind| kind == "pages"))
    }
}

impl Drop for OurLender {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.store);
    }
}

/// Starts the process. Returns it with its subsystem's NQN, which is empty for NBD.
fn spawn(
    kind: Kind,
    dir: &Path,
    store: &Path,
    extents: u64,
    name: Option<&str>,
) -> (Child, String) {
    let program = match kind {
        Kind::Nbd => example("aquifer-nbd", "nbd_memory"),
        Kind::Nvme => example("aquifer-nvme", "nvme_memory"),
    };
    let mut child = Command::new(program)
        .arg(format!("unix:{}", dir.join("nbd").display()))
        .arg((extents * EXTENT_SIZE).to_string())
        .arg(store)
        .envs(name.map(|name| ("SUBSYSTEM", name)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let name = if kind == Kind::Nvme { line.split_whitespace().last().unwrap() } else { "" };
    (child, name.to_owned())
}
