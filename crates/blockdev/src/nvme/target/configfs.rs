//! Subsystems of the kernel's NVMe target (nvmet) in configfs.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use aquifer_nvme::proto::Nqn;
use rustix::fs::{FlockOperation, flock};

use super::super::{Module, NvmeError, Root};
use super::ram::Ram;
use super::{HostSecrets, forget_host, mark, port};

const CONFIGFS: &str = "/sys/kernel/config";
pub(super) const NVMET: &str = "/sys/kernel/config/nvmet";
pub(super) const SUBSYSTEMS: &str = "/sys/kernel/config/nvmet/subsystems";
pub(super) const HOSTS: &str = "/sys/kernel/config/nvmet/hosts";

/// Tells whether the kernel's target can be configured.
pub(super) fn is_there(root: &Root) -> bool {
    root.path(SUBSYSTEMS).is_dir()
}

/// Locks the target's configuration against other processes that use this lock.
pub(super) fn lock(root: &Root) -> Result<File, NvmeError> {
    let locked = open_dir(root, SUBSYSTEMS).and_then(|dir| {
        flock(&dir, FlockOperation::LockExclusive)?;
        Ok(dir)
    });
    locked.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => no_target(root),
        _ => NvmeError::io(format_args!("cannot lock {SUBSYSTEMS}"))(error),
    })
}

/// Says why the target cannot be configured, and how to remedy that.
pub(super) fn no_target(root: &Root) -> NvmeError {
    if Module::find(root, "nvmet") == Module::Loaded {
        return NvmeError::new(format!("{NVMET} does not exist"))
            .help(format!("mount -t configfs none {CONFIGFS}"));
    }
    NvmeError::new("the kernel's NVMe target is not loaded")
        .help("modprobe nvmet-tcp (and nvmet-rdma for RDMA)")
}

fn open_dir(root: &Root, path: impl AsRef<Path>) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(root.path(path))
}

/// A subsystem in configfs, existing or not, that this program manages.
#[derive(Clone, Debug)]
pub(super) struct Subsystem {
    root: Root,
    nqn: Nqn,
}

impl Subsystem {
    pub(super) fn new(root: &Root, nqn: Nqn) -> Self {
        Self { root: root.clone(), nqn }
    }

    /// Returns all subsystems with the mark in their name.
    pub(super) fn marked(root: &Root) -> Result<Vec<Self>, NvmeError> {
        let names = root
            .names(SUBSYSTEMS)
            .map_err(NvmeError::io(format_args!("cannot read {SUBSYSTEMS}")))?;
        let ours = names.into_iter().filter(|name| mark::is_ours(name));
        Ok(ours.filter_map(|name| Some(Self::new(root, name.parse().ok()?))).collect())
    }

    pub(super) fn nqn(&self) -> &Nqn {
        &self.nqn
    }

    /// Creates the subsystem, empty. The returned lock shows that its creator lives.
    pub(super) fn make(&self) -> Result<File, NvmeError> {
        let made = self.root.make_dir(self.dir());
        made.map_err(NvmeError::io(format_args!("cannot make the subsystem {}", self.nqn)))?;
        // The model that 'nvme list' shows. Older kernels do not allow setting it.
        let _ = self.root.write(self.dir().join("attr_model"), "aquifer");
        self.seize()?.ok_or_else(|| {
            NvmeError::new(format!("another process has the subsystem {}", self.nqn))
        })
    }

    /// Takes the creator's lock; returns `None` while the creator lives.
    pub(super) fn seize(&self) -> Result<Option<File>, NvmeError> {
        let fail = || NvmeError::io(format!("cannot lock the subsystem {}", self.nqn));
        let dir = open_dir(&self.root, self.dir()).map_err(fail())?;
        match flock(&dir, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(dir)),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(fail()(error.into())),
        }
    }

    /// Admits the given hosts, and with `secrets` only after authentication. Admits every host if
    /// `hosts` is empty.
    pub(super) fn allow(
        &self,
        hosts: &[Nqn],
        secrets: Option<&HostSecrets>,
    ) -> Result<(), NvmeError> {
        let fail = || NvmeError::io(format!("cannot set the allowed hosts of {}", self.nqn));
        let any = if hosts.is_empty() { "1" } else { "0" };
        self.root.write(self.dir().join("attr_allow_any_host"), any).map_err(fail())?;
        for host in hosts {
            let object = Path::new(HOSTS).join(host.as_str());
            match self.root.make_dir(&object) {
                // Another subsystem may admit this host, too.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => made.map_err(fail())?,
            }
            if let Some(secrets) = secrets {
                self.demand(&object, secrets)?;
            }
            self.root
                .link(&object, self.dir().join("allowed_hosts").join(host.as_str()))
                .map_err(fail())?;
        }
        Ok(())
    }

    fn demand(&self, host: &Path, secrets: &HostSecrets) -> Result<(), NvmeError> {
        for (attribute, secret) in
            [("dhchap_key", &secrets.host), ("dhchap_ctrl_key", &secrets.target)]
        {
            self.root.write(host.join(attribute), secret).map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => NvmeError::new(
                    "the kernel's target cannot authenticate hosts (CONFIG_NVME_TARGET_AUTH)",
                )
                .help("on a trusted network, set [lend] secrets = false"),
                _ => NvmeError::io("the kernel's target refuses a secret")(error),
            })?;
        }
        Ok(())
    }

    /// Tells whether the subsystem exists.
    pub(super) fn is_there(&self) -> bool {
        self.root.path(self.dir()).is_dir()
    }

    /// Tells whether the namespace is enabled.
    pub(super) fn is_enabled(&self) -> bool {
        self.root.read(self.namespace().join("enable")).is_some_and(|text| text == "1")
    }

    /// Returns the RAM disk under the namespace.
    pub(super) fn ram(&self) -> Option<Ram> {
        Ram::of_device(&self.root.read(self.namespace().join("device_path"))?)
    }

    /// Creates the namespace and sets its block device.
    pub(super) fn name_device(&self, device: &Path) -> Result<(), NvmeError> {
        let fail = || NvmeError::io(format!("cannot make a namespace over {}", device.display()));
        let namespace = self.namespace();
        self.root.make_dir(&namespace).map_err(fail())?;
        self.root
            .write(namespace.join("device_path"), &device.display().to_string())
            .map_err(fail())?;
        // Hosts compare this UUID after a reconnect, to tell whether the namespace is the one that
        // they had.
        let uuid = self.nqn.as_str().rsplit(':').next().unwrap_or_default();
        self.root.write(namespace.join("device_uuid"), uuid).map_err(fail())
    }

    /// Enables the namespace.
    pub(super) fn enable(&self) -> Result<(), NvmeError> {
        let enabled = self.root.write(self.namespace().join("enable"), "1");
        enabled.map_err(NvmeError::io(format_args!("cannot serve the namespace of {}", self.nqn)))
    }

    /// Removes the subsystem with its ports, namespaces, hosts and RAM disk, as far as they exist.
    pub(super) fn take_away(&self) -> Result<(), NvmeError> {
        let root = &self.root;
        let fail = || NvmeError::io(format!("cannot remove the subsystem {}", self.nqn));
        port::close(root, &self.nqn)?;
        let mut disks = Vec::new();
        let namespaces = self.dir().join("namespaces");
        for namespace in root.names(&namespaces).map_err(fail())? {
            let namespace = namespaces.join(namespace);
            disks.extend(
                root.read(namespace.join("device_path")).and_then(|path| Ram::of_device(&path)),
            );
            root.write(namespace.join("enable"), "0").map_err(fail())?;
            root.remove_dir(namespace).map_err(fail())?;
        }
        let allowed = self.dir().join("allowed_hosts");
        for host in root.names(&allowed).map_err(fail())? {
            root.remove_link(allowed.join(&host)).map_err(fail())?;
            forget_host(root, &host);
        }
        root.remove_dir(self.dir()).map_err(fail())?;
        disks.iter().try_for_each(|disk| disk.remove(root))
    }

    fn dir(&self) -> PathBuf {
        Path::new(SUBSYSTEMS).join(self.nqn.as_str())
    }

    fn namespace(&self) -> PathBuf {
        self.dir().join("namespaces/1")
    }
}
