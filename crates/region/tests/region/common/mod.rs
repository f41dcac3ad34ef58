//! A region with its engine in this process, over a lender of this project.

// Each test program uses only a part of this module.
#![allow(dead_code, clippy::unwrap_used)]

pub mod flat;
#[path = "../../../../volume/tests/volume/common/mod.rs"]
pub mod pool;

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_region::{Engine, EngineConfig, LinkSpec, Paging, PolicyKind, PrefetchKind, Scheme};
use aquifer_region_client::{Listener, Region, Reply, Request};
use aquifer_store::tmpfs::stores;
use aquifer_volume::{Claim, VolumeConfig};
use pool::OurLender;
use tempfile::TempDir;

pub const PAGE: u64 = PAGE_SIZE as u64;

/// The files of a region, and its lender.
pub struct Setting {
    pub lender: Arc<OurLender>,
    pub directory: TempDir,
    /// The emulated latency of a page, if longer than the real one.
    pub latency: Option<Duration>,
    pub workers: usize,
    pages: u64,
    /// How often the region has moved to another host.
    generation: u32,
}

/// An engine in this process.
pub struct Serving {
    pub engine: Arc<Engine>,
    threads: Vec<JoinHandle<()>>,
}

impl Setting {
    pub fn new(pages: u64) -> Self {
        let extents = (pages * PAGE).div_ceil(aquifer_page::EXTENT_SIZE);
        Self::with(Arc::new(OurLender::start(extents)), pages, 0)
    }

    /// Makes the files of the region on its next host.
    pub fn there(&self) -> Self {
        Self::with(self.lender.clone(), self.pages, self.generation + 1)
    }

    fn with(lender: Arc<OurLender>, pages: u64, generation: u32) -> Self {
        let directory = tempfile::tempdir_in(stores().unwrap()).unwrap();
        std::fs::create_dir(directory.path().join(".region")).unwrap();
        Self { lender, directory, latency: None, workers: 2, pages, generation }
    }

    pub fn region(&self) -> PathBuf {
        self.directory.path().join("region")
    }

    /// Returns the path of the group's frames.
    pub fn frames(&self) -> PathBuf {
        self.directory.path().join("frames")
    }

    pub fn map(&self) -> Region {
        Region::map(&self.region()).unwrap()
    }

    pub fn serve(&self, frames: u64, policy: PolicyKind, scheme: Scheme) -> Serving {
        self.serve_as(frames, policy, scheme, false)
    }

    /// Starts an engine; with `foreign`, another engine will hand the region over to it.
    pub fn serve_as(
        &self,
        frames: u64,
        policy: PolicyKind,
        scheme: Scheme,
        foreign: bool,
    ) -> Serving {
        let beside = |name: &str| self.directory.path().join(".region").join(name);
        let open = |path: &Path, size: u64| {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(path)
                .unwrap();
            // The file of an earlier engine is not truncated.
            file.set_len(size.max(file.metadata().unwrap().len())).unwrap();
            file
        };
        let config = EngineConfig {
            cache: Bytes(frames * PAGE),
            may_be_unwatched: false,
            paging: Paging {
                policy,
                scheme,
                prefetch: PrefetchKind::Auto,
                link: self.latency.map(|latency| LinkSpec { latency, one_at_a_time: false }),
                fault_timeout: None,
                workers: self.workers,
            },
            spill: None,
            copies: Vec::new(),
            disk: None,
            foreign,
        };
        let volume = VolumeConfig { capacity: Bytes(self.pages * PAGE), ..pool::config(1) };
        let paths = [self.region(), beside("table"), beside("extent_map"), beside("sharers")];
        let sizes = [self.pages * PAGE, self.pages, 0, 0];
        let files = std::array::from_fn(|at| (paths[at].as_path(), open(&paths[at], sizes[at])));
        let mut lease = self.lender.lease(1);
        lease.claim = lease.claim.map(|claim| Claim { generation: self.generation, ..claim });
        let leases = [lease];
        let beside = [beside("mapped"), self.frames(), beside("watched")];
        let engine = Arc::new(Engine::open(&config, volume, &leases, files, beside).unwrap());
        let threads = engine.start().unwrap();
        let listener = Listener::bind(&self.directory.path().join(".region/programs")).unwrap();
        let programs = engine.clone();
        // The thread ends with the test.
        thread::spawn(move || {
            while let Ok(connection) = listener.accept() {
                let engine = programs.clone();
                thread::spawn(move || converse(&engine, connection));
            }
        });
        Serving { engine, threads }
    }
}

fn converse(engine: &Engine, connection: aquifer_region_client::Connection) {
    while let Ok(Some((request, descriptors))) = connection.receive() {
        match request {
            Request::Attach(attach) => {
                engine.attend(&attach, descriptors.try_into().unwrap(), connection).unwrap();
                return;
            }
            Request::Discard(pages) => {
                engine.discard(pages).unwrap();
                connection.send(&Reply::Done, &[]).unwrap();
            }
            Request::Release(release) => {
                engine.release(connection.peer().unwrap(), &release);
                connection.send(&Reply::Done, &[]).unwrap();
            }
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.engine.end();
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
    }
}
