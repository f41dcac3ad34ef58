use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use aquifer_fabric::nvme::proto::Nqn;
use rustix::fs::{FlockOperation, flock};

use super::super::{Module, NvmeError, Root};
use super::ram::Ram;
use super::{HostSecrets, forget_host, mark, port};

const CONFIGFS: &str = "/sys/kernel/config";
pub(super) const NVMET: &str = "/sys/kernel/config/nvmet";
pub(super) const SUBSYSTEMS: &str = "/sys/kernel/config/nvmet/subsystems";
pub(super) const HOSTS: &str = "/sys/kernel/config/nvmet/hosts";

/// Whether the kernel's target is there to be configured.
pub(super) fn is_there(root: &Root) -> bool {
    root.path(SUBSYSTEMS).is_dir()
}

/// Keeps others that go by this lock from making or removing anything meanwhile.
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

/// What keeps it from being there.
pub(super) fn no_target(root: &Root) -> NvmeError {
    if Module::find(root, "nvmet") == Module::Loaded {
        return NvmeError::new(format!("{NVMET} is not there"))
            .help(format!("mount -t configfs none {CONFIGFS}"));
    }
    NvmeError::new("the kernel's NVMe target is not loaded")
        .help("modprobe nvmet-tcp (and nvmet-rdma for RDMA)")
}

fn open_dir(root: &Root, path: impl AsRef<Path>) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(root.path(path))
}

/// A subsystem of ours in configfs, there or not.
#[derive(Clone, Debug)]
pub(super) struct Subsystem {
    root: Root,
    nqn: Nqn,
}

impl Subsystem {
    pub(super) fn new(root: &Root, nqn: Nqn) -> Self {
        Self { root: root.clone(), nqn }
    }

    /// All that carry the mark.
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

    /// Makes it, without anything in it; what is returned says that its maker lives.
    pub(super) fn make(&self) -> Result<File, NvmeError> {
        let made = self.root.make_dir(self.dir());
        made.map_err(NvmeError::io(format_args!("cannot make the subsystem {}", self.nqn)))?;
        // What 'nvme list' shows; older kernels do not let it be set.
        let _ = self.root.write(self.dir().join("attr_model"), "aquifer");
        self.seize()?.ok_or_else(|| {
            NvmeError::new(format!("another process has the subsystem {}", self.nqn))
        })
    }

    /// Takes the maker's place, if the maker is gone.
    pub(super) fn seize(&self) -> Result<Option<File>, NvmeError> {
        let fail = || NvmeError::io(format!("cannot lock the subsystem {}", self.nqn));
        let dir = open_dir(&self.root, self.dir()).map_err(fail())?;
        match flock(&dir, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(dir)),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(fail()(error.into())),
        }
    }

    /// Lets these hosts in, if they know their secret, or all if there are none.
    pub(super) fn allow(
        &self,
        hosts: &[Nqn],
        secrets: Option<&HostSecrets>,
    ) -> Result<(), NvmeError> {
        let fail = || NvmeError::io(format!("cannot say who may use {}", self.nqn));
        let any = if hosts.is_empty() { "1" } else { "0" };
        self.root.write(self.dir().join("attr_allow_any_host"), any).map_err(fail())?;
        for host in hosts {
            let object = Path::new(HOSTS).join(host.as_str());
            match self.root.make_dir(&object) {
                // Other subsystems may have it, too.
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
                .help("over a network that you trust, lend without secrets"),
                _ => NvmeError::io("the kernel's target refuses a secret")(error),
            })?;
        }
        Ok(())
    }

    /// Whether there is such a subsystem.
    pub(super) fn is_there(&self) -> bool {
        self.root.path(self.dir()).is_dir()
    }

    /// Whether its namespace is served.
    pub(super) fn is_enabled(&self) -> bool {
        self.root.read(self.namespace().join("enable")).is_some_and(|text| text == "1")
    }

    /// What its namespace is over.
    pub(super) fn ram(&self) -> Option<Ram> {
        Ram::of_device(&self.root.read(self.namespace().join("device_path"))?)
    }

    /// Says what its namespace is to be over.
    pub(super) fn name_device(&self, device: &Path) -> Result<(), NvmeError> {
        let fail = || NvmeError::io(format!("cannot make a namespace over {}", device.display()));
        let namespace = self.namespace();
        self.root.make_dir(&namespace).map_err(fail())?;
        self.root
            .write(namespace.join("device_path"), &device.display().to_string())
            .map_err(fail())?;
        // Hosts tell by it whether what comes back after an interruption is what they had.
        let uuid = self.nqn.as_str().rsplit(':').next().unwrap_or_default();
        self.root.write(namespace.join("device_uuid"), uuid).map_err(fail())
    }

    /// Has the namespace served.
    pub(super) fn enable(&self) -> Result<(), NvmeError> {
        let enabled = self.root.write(self.namespace().join("enable"), "1");
        enabled.map_err(NvmeError::io(format_args!("cannot serve the namespace of {}", self.nqn)))
    }

    /// Takes it away with all that belongs to it, whatever of it there is: ports, namespaces, hosts, RAM.
    pub(super) fn take_away(&self) -> Result<(), NvmeError> {
        let root = &self.root;
        let fail = || NvmeError::io(format!("cannot take away the subsystem {}", self.nqn));
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
