//! Transports of NVMe over Fabrics, and the kernel modules for them.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Root;

/// A transport of NVMe over Fabrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// TCP.
    Tcp,
    /// RDMA: InfiniBand, RoCE, or soft-RoCE, which runs on any Ethernet card.
    Rdma,
}

impl Transport {
    /// All transports.
    pub const ALL: [Self; 2] = [Self::Tcp, Self::Rdma];

    /// Returns the kernel's name of the transport.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        }
    }

    /// Returns the module of the kernel's initiator.
    pub fn initiator_module(self) -> &'static str {
        match self {
            Self::Tcp => "nvme-tcp",
            Self::Rdma => "nvme-rdma",
        }
    }

    /// Returns the module of the kernel's target.
    pub fn target_module(self) -> &'static str {
        match self {
            Self::Tcp => "nvmet-tcp",
            Self::Rdma => "nvmet-rdma",
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Availability of a kernel module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Module {
    /// Loaded or built in.
    Loaded,
    /// On disk for the running kernel, but not loaded.
    Available,
    /// Not found.
    Missing,
}

impl Module {
    /// Looks for the module `name` of the running kernel.
    pub fn find(root: &Root, name: &str) -> Self {
        let loaded = format!("/sys/module/{}", name.replace('-', "_"));
        if [Some(loaded.as_str()), sign(name)]
            .into_iter()
            .flatten()
            .any(|path| root.path(path).exists())
        {
            return Self::Loaded;
        }
        let release = root.read("/proc/sys/kernel/osrelease").unwrap_or_default();
        let listed = |list: &str| {
            let text = root.read(format!("/lib/modules/{release}/{list}")).unwrap_or_default();
            text.lines().any(|line| is_of(line, name))
        };
        if listed("modules.builtin") {
            Self::Loaded
        } else if listed("modules.dep") {
            Self::Available
        } else {
            Self::Missing
        }
    }
}

/// Returns a path that only this module creates. `/sys/module` lacks built-in modules without
/// parameters, and a kernel installed without modules has no `modules.builtin`.
fn sign(name: &str) -> Option<&'static str> {
    match name {
        "zram" => Some("/sys/class/zram-control"),
        "brd" => Some("/sys/block/ram0"),
        "nvme-fabrics" => Some("/dev/nvme-fabrics"),
        "nvmet" => Some("/sys/kernel/config/nvmet"),
        _ => None,
    }
}

/// Tells whether a line of `modules.dep` or `modules.builtin` describes the module:
/// `kernel/…/NAME.ko[.xz][: …]`. Hyphens and underscores are equal.
fn is_of(line: &str, name: &str) -> bool {
    let file = line.split(':').next().unwrap_or_default().rsplit('/').next().unwrap_or_default();
    file.split('.').next().unwrap_or_default().replace('-', "_") == name.replace('-', "_")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_module_is_found_loaded_built_in_or_on_disk() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        let write = |path: &str, text: &str| {
            let path = root.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("/proc/sys/kernel/osrelease", "6.1.0-50-amd64\n");
        write("/sys/module/nvme_tcp/refcnt", "0");
        write("/lib/modules/6.1.0-50-amd64/modules.builtin", "kernel/drivers/block/brd.ko\n");
        write(
            "/lib/modules/6.1.0-50-amd64/modules.dep",
            "kernel/drivers/nvme/target/nvmet-tcp.ko.xz: kernel/drivers/nvme/target/nvmet.ko.xz\n",
        );
        let found = |name| Module::find(&root, name);
        assert_eq!(found("nvme-tcp"), Module::Loaded);
        assert_eq!(found("brd"), Module::Loaded);
        assert_eq!(found("nvmet_tcp"), Module::Available);
        // Only a dependency of another module; its own line is missing.
        assert_eq!(found("nvmet"), Module::Missing);
        assert_eq!(found("zram"), Module::Missing);
        write("/sys/class/zram-control/hot_add", "");
        assert_eq!(found("zram"), Module::Loaded);
    }
}
