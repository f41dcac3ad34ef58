//! The boot of a guest: from a bare kernel to an environment that programs expect.

use std::ffi::CString;
use std::fs::{self, File};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};
use rustix::system::finit_module;

/// Directory with modules and a file `order`, which the testbed makes.
const MODULES_DIR: &str = "/modules";

/// A module that refuses processors without CRC-32C instructions, as emulated ones are. Other
/// modules need this one only to be faster.
const CRC32C_MODULE: &str = "crc32c-intel.ko";

/// Type, mount point, and whether the mount must succeed; [`mount_one`] makes missing directories.
const FILE_SYSTEMS: [(&str, &str, bool); 8] = [
    ("proc", "/proc", true),
    ("sysfs", "/sys", true),
    ("devtmpfs", "/dev", true),
    ("tmpfs", "/dev/shm", true),
    ("tmpfs", "/run", true),
    ("cgroup2", "/sys/fs/cgroup", true),
    ("debugfs", "/sys/kernel/debug", false),
    ("configfs", "/sys/kernel/config", false),
];

/// Mounts file systems, loads modules and installs busybox's commands.
pub(crate) fn prepare() -> Result<()> {
    // Mount configfs after loading modules: it may be one.
    let (late, early): (Vec<_>, Vec<_>) =
        FILE_SYSTEMS.iter().partition(|(kind, ..)| *kind == "configfs");
    early.into_iter().try_for_each(mount_one)?;
    fs::create_dir_all("/tmp")?;
    let installed = Command::new("/bin/busybox").args(["--install", "-s", "/bin"]).status();
    ensure!(
        installed.context("cannot run /bin/busybox")?.success(),
        "busybox does not install its commands"
    );
    load_modules()?;
    late.into_iter().try_for_each(mount_one)
}

fn mount_one((kind, at, needed): &(&str, &str, bool)) -> Result<()> {
    let _ = fs::create_dir_all(at);
    let mounted = mount(*kind, *at, *kind, MountFlags::empty(), None);
    if *needed { mounted.with_context(|| format!("cannot mount {kind} on {at}")) } else { Ok(()) }
}

/// Loads the modules that `/modules/order` lists: a file name and parameters on each line.
fn load_modules() -> Result<()> {
    let order = fs::read_to_string(format!("{MODULES_DIR}/order")).context("no list of modules")?;
    for line in order.lines() {
        let (name, parameters) = line.split_once(' ').unwrap_or((line, ""));
        let file = File::open(format!("{MODULES_DIR}/{name}"))
            .with_context(|| format!("module {name} is missing"))?;
        match finit_module(file, &CString::new(parameters)?, 0) {
            Err(Errno::NODEV) if name == CRC32C_MODULE => {}
            loaded => loaded.with_context(|| format!("cannot load {name} with '{parameters}'"))?,
        }
    }
    // The files take memory, which some tests count.
    fs::remove_dir_all(MODULES_DIR).context("cannot remove the modules' files")
}
