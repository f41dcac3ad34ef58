//! A lender of ours, as a process: the example `nbd_memory` over a store that outlives it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use aquifer_fabric::Address;
use aquifer_page::{Bytes, EXTENT_SIZE};
use tempfile::TempDir;

use super::example::example;
use super::wait_until;

pub struct OurLender {
    child: Child,
    extents: u64,
    dir: TempDir,
}

impl OurLender {
    pub fn start(extents: u64) -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let lender = Self { child: spawn(dir.path(), extents), extents, dir };
        lender.wait();
        lender
    }

    pub fn address(&self) -> Address {
        Address::Unix(self.dir.path().join("nbd"))
    }

    /// As `kill -9`.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn restart(&mut self) {
        self.child = spawn(self.dir.path(), self.extents);
        self.wait();
    }

    fn wait(&self) {
        wait_until("the lender listens", || UnixStream::connect(self.dir.path().join("nbd")).is_ok());
    }

    /// The RAM that its store takes, as the kernel has it.
    pub fn ram(&self) -> Bytes {
        let files = fs::read_dir(self.dir.path().join("store")).unwrap().map(|entry| entry.unwrap());
        let pages = files.filter(|file| file.path().extension().is_some_and(|kind| kind == "pages"));
        Bytes(pages.map(|file| file.metadata().unwrap().blocks() * 512).sum())
    }
}

impl Drop for OurLender {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(dir: &Path, extents: u64) -> Child {
    Command::new(example("aquifer-fabric", "nbd_memory"))
        .arg(format!("unix:{}", dir.join("nbd").display()))
        .arg((extents * EXTENT_SIZE).to_string())
        .arg(dir.join("store"))
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}
