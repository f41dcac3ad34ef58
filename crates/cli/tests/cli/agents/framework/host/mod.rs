//! A host: its memory, its files, and the commands that an operator gives on it.

mod agent;
mod view;

use std::fs;
use std::net::SocketAddr;
use std::ops::Deref;
use std::path::PathBuf;
use std::process::Command;

use aquifer_api::order::{Borrowed, Returned};
use aquifer_cli::cgroup::{Cgroup, Hierarchy, Limits, Swap};
use aquifer_page::{Bytes, HostName};
use toml::Table;

use super::{Answer, Load, Spec};

pub use agent::{lives, process};

/// A host of a cluster, with a memory cgroup as its machine.
pub struct Host {
    host: aquifer_hosts::Host,
    cgroup: Cgroup,
}

impl Deref for Host {
    type Target = aquifer_hosts::Host;

    fn deref(&self) -> &aquifer_hosts::Host {
        &self.host
    }
}

impl Host {
    pub(in crate::agents::framework) fn new(spec: &Spec, host: aquifer_hosts::Host) -> Self {
        let hierarchy = Hierarchy::find().unwrap();
        hierarchy.enable().unwrap();
        let cluster = host.dir().parent().unwrap().file_name().unwrap().to_str().unwrap();
        let limits = Limits { memory: spec.memory, swap: Swap::Unlimited };
        let cgroup =
            Cgroup::create(&hierarchy, &format!("{cluster}-{}", spec.name), limits).unwrap();
        let host = Self { host, cgroup };
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
        let changed = self.host.configure(|config| {
            for (name, key, path) in
                [("memory", "cgroup", self.cgroup.path()), ("borrow", "spill", &self.spill())]
            {
                let section = config.entry(name).or_insert_with(|| Table::new().into());
                let path = path.to_str().unwrap();
                section.as_table_mut().unwrap().insert(key.to_owned(), path.into());
            }
            change(config);
        });
        changed.unwrap();
    }

    /// Returns its name as the API's type.
    pub fn host_name(&self) -> HostName {
        self.name().parse().unwrap()
    }

    /// Returns the address of its pages over NVMe/TCP, for hosts that serve it.
    pub fn nvme(&self) -> SocketAddr {
        (self.api().ip(), 4420).into()
    }

    /// Returns the directory of its spill files.
    pub fn spill(&self) -> PathBuf {
        self.dir().join("spill")
    }

    /// Returns the command `aquifer WORDS` on this host.
    pub fn aquifer(&self, words: &[&str]) -> Command {
        let mut command = self.command().unwrap();
        command.args(words);
        command
    }

    /// Moves the agent into this host's cgroup, so that the ledger counts the VMs that it takes.
    pub fn count_agent(&self) {
        let pid = self.status().agent.pid.to_string();
        fs::write(self.cgroup.path().join("cgroup.procs"), pid).unwrap();
    }

    /// Returns the command `aquifer WORDS` in this host's cgroup, so that the processes that it
    /// starts belong to the host.
    pub fn inside(&self, words: &[&str]) -> Command {
        let command = self.aquifer(words);
        let mut inside = Command::new("sh");
        inside.args(["-c", r#"echo 0 > "$0" && exec "$@""#]);
        inside.arg(self.cgroup.path().join("cgroup.procs"));
        inside.arg(command.get_program()).args(command.get_args());
        for (key, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(key, value),
                None => inside.env_remove(key),
            };
        }
        inside
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

    /// Returns the files of the leases that it has granted.
    pub fn lease_files(&self) -> Vec<PathBuf> {
        let files =
            fs::read_dir(self.store()).into_iter().flatten().flatten().map(|entry| entry.path());
        files.filter(|path| path.extension().is_some()).collect()
    }
}
