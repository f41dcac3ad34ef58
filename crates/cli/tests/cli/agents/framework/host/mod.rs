//! A host: its memory, its files, and the commands that an operator gives on it.

mod agent;
mod view;

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Mutex;

use aquifer_api::order::{Borrowed, Returned};
use aquifer_cli::cgroup::{Cgroup, Hierarchy, Limits, Swap};
use aquifer_page::{Bytes, HostName};
use toml::Table;

use super::{Answer, Load, Spec};

pub use agent::{lives, process};
pub use view::block_on;

/// A host of a cluster.
pub struct Host {
    name: &'static str,
    address: Ipv4Addr,
    dir: PathBuf,
    store: PathBuf,
    agent: Mutex<Option<Child>>,
    cgroup: Cgroup,
}

impl Host {
    pub(in crate::agents::framework) fn new(
        spec: &Spec,
        address: Ipv4Addr,
        cluster: &Path,
    ) -> Self {
        let hierarchy = Hierarchy::find().unwrap();
        hierarchy.enable().unwrap();
        let cluster_name = cluster.file_name().unwrap().to_str().unwrap();
        let limits = Limits { memory: spec.memory, swap: Swap::Unlimited };
        let cgroup =
            Cgroup::create(&hierarchy, &format!("{cluster_name}-{}", spec.name), limits).unwrap();
        let dir = cluster.join(spec.name);
        let store = Path::new("/dev/shm/aquifer").join(cluster_name).join(spec.name);
        let host = Self { name: spec.name, address, dir, store, agent: Mutex::new(None), cgroup };
        host.configure(|config| {
            spec.apply(config);
            if spec.nvme {
                config["lend"]
                    .as_table_mut()
                    .unwrap()
                    .insert("nvme".to_owned(), host.nvme().to_string().into());
            }
        });
        host
    }

    /// Changes the configuration that `aquifer cluster init` wrote; the agent reads it at its next
    /// start.
    pub fn configure(&self, change: impl FnOnce(&mut Table)) {
        let text = fs::read_to_string(self.config()).unwrap();
        let mut config: Table = text.parse().unwrap();
        let mut set = |key: &str, path: &Path| {
            config.insert(key.to_owned(), path.to_str().unwrap().into());
        };
        set("tls", &self.tls());
        set("socket", &self.socket());
        set("state", &self.state());
        set("store", &self.store);
        let mut section = |name: &str, key: &str, path: &Path| {
            let section = config.entry(name).or_insert_with(|| Table::new().into());
            section.as_table_mut().unwrap().insert(key.to_owned(), path.to_str().unwrap().into());
        };
        section("memory", "cgroup", self.cgroup.path());
        section("borrow", "spill", &self.spill());
        change(&mut config);
        fs::write(self.config(), config.to_string()).unwrap();
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns its name as the API's type.
    pub fn host_name(&self) -> HostName {
        self.name.parse().unwrap()
    }

    /// Returns the address of its agent for peers.
    pub fn api(&self) -> SocketAddr {
        (self.address, 7070).into()
    }

    /// Returns the address of its pages for borrowers.
    pub fn pages(&self) -> SocketAddr {
        (self.address, 7071).into()
    }

    /// Returns the address of its pages over NVMe/TCP, for hosts that serve it.
    pub fn nvme(&self) -> SocketAddr {
        (self.address, 4420).into()
    }

    pub fn config(&self) -> PathBuf {
        self.dir.join("agent.toml")
    }

    pub fn tls(&self) -> PathBuf {
        self.dir.join("tls")
    }

    pub fn socket(&self) -> PathBuf {
        self.state().join("agent.sock")
    }

    /// Returns the directory of its sockets and logs.
    pub fn state(&self) -> PathBuf {
        self.dir.join("state")
    }

    /// Returns the directory of its spill files.
    pub fn spill(&self) -> PathBuf {
        self.dir.join("spill")
    }

    /// Returns the command `aquifer WORDS` on this host.
    pub fn aquifer(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_aquifer"));
        command
            .args(words)
            .env("AQUIFER_RUN_DIR", self.state())
            .env("AQUIFER_SOCKET", self.socket());
        command
    }

    /// Borrows by hand.
    #[track_caller]
    pub fn borrow(&self, bytes: Bytes) -> Borrowed {
        Answer::of(&mut self.aquifer(&["host", "borrow", "--json", "--size", &bytes.0.to_string()]))
            .json()
    }

    /// Returns memory by hand.
    #[track_caller]
    pub fn give_back(&self) -> Returned {
        Answer::of(&mut self.aquifer(&["host", "return", "--json"])).json()
    }

    /// Starts a program on this host that fills this much memory as fast as it can.
    pub fn load(&self, bytes: Bytes) -> Load {
        Load::start(&self.cgroup, bytes, None)
    }

    /// Starts a program on this host that fills `rate` of memory a second.
    pub fn slow_load(&self, bytes: Bytes, rate: Bytes) -> Load {
        Load::start(&self.cgroup, bytes, Some(rate))
    }

    /// Returns how much its programs have swapped out.
    pub fn swapped(&self) -> Bytes {
        self.cgroup.swap_used().unwrap()
    }

    /// Returns the directory of the pages that it holds for others.
    pub fn store(&self) -> &Path {
        &self.store
    }

    /// Returns the RAM that those pages take, by the kernel's count.
    pub fn stored(&self) -> Bytes {
        let pages = self
            .lease_files()
            .into_iter()
            .filter(|path| path.extension().is_some_and(|e| e == "pages"));
        // stat(2) counts blocks of 512 bytes.
        Bytes(
            pages.filter_map(|path| fs::metadata(path).ok()).map(|file| file.blocks() * 512).sum(),
        )
    }

    /// Returns the files of the leases that it has granted.
    pub fn lease_files(&self) -> Vec<PathBuf> {
        let files =
            fs::read_dir(&self.store).into_iter().flatten().flatten().map(|entry| entry.path());
        files.filter(|path| path.extension().is_some()).collect()
    }
}
