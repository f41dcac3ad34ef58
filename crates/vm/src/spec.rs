//! The specification of a guest, and QEMU's command line for it.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use aquifer_disk_cache::ARRIVING;
use aquifer_guest_agent::message::PORT;
use aquifer_page::{Bytes, HUGE_PAGE_SIZE, RegionName};
use aquifer_region_client::window;
use serde::{Deserialize, Serialize};

use crate::error::VmError;
use crate::node::NodeChoice;
use crate::process::Files;
use crate::processors::{Accelerator, Processors};

/// The place of a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Backing {
    /// A region: the pool, with local RAM as its cache.
    Region,
    /// RAM of the host.
    Local {
        /// Size of the huge pages (hugetlbfs) to use; `None` for ordinary pages.
        huge: Option<Bytes>,
    },
}

/// The specification of a guest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmSpec {
    /// Name of the VM and of its region.
    pub name: RegionName,
    /// Memory at boot: whole MiB.
    pub memory: Bytes,
    /// Largest size of the memory: `memory`, plus whole [`Self::BLOCK`]s.
    pub max_memory: Bytes,
    /// Place of the memory.
    pub backing: Backing,
    /// Processors.
    #[serde(flatten)]
    pub processors: Processors,
    /// QEMU's machine type.
    pub machine: String,
    /// Image files of disks. A name that ends in `.qcow2` has that format; others are raw.
    pub disks: Vec<PathBuf>,
    /// Further disks, numbered after those, which the VM reaches through its group's cache.
    #[serde(default)]
    pub cached_disks: Vec<PathBuf>,
    /// What boots in place of the first disk.
    #[serde(flatten)]
    pub boot: Boot,
    /// QEMU's executable.
    pub qemu: PathBuf,
    /// The library that maps the region in QEMU.
    pub preload: PathBuf,
    /// Further arguments of QEMU.
    pub extra: Vec<String>,
}

/// A kernel that QEMU boots in place of a disk's.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Boot {
    /// The kernel; the guest boots from its first disk without one.
    pub kernel: Option<PathBuf>,
    /// The kernel's initial RAM file system.
    pub initrd: Option<PathBuf>,
    /// The kernel's command line.
    pub append: Option<String>,
}

/// Refused arguments, and why.
const UNFIT: [(&str, &str); 11] = [
    ("-m", "set the memory's size with --memory"),
    ("-M", "set the machine type with --machine"),
    ("-machine", "set the machine type with --machine"),
    ("-accel", "set the accelerator with --accel"),
    ("-cpu", "set the processor model with --cpu, which migrations check"),
    ("-incoming", "migrate a VM with 'aquifer vm migrate'"),
    ("-daemonize", "Aquifer always runs VMs in the background"),
    ("mem-lock=on", "the engine cannot evict locked memory"),
    ("vfio", "the device would write to pages that the engine has evicted"),
    ("vhost-user", "the other process would read evicted pages as zeroes"),
    ("vhost-vdpa", "the device would write to pages that the engine has evicted"),
];

/// Keeps a guest that has broken into QEMU from starting programs, raising its privileges and
/// taking more of the host's resources. The operator's own `-sandbox` replaces this one.
const SANDBOX: [&str; 2] =
    ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"];

/// QEMU's id of the virtio-mem device by which the VM is resized.
const GROWTH: &str = "aquifer-growth";

/// QEMU's id of that device's memory backend.
const GROWN: &str = "growth";

/// What a guest uses on a host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    /// The file of its memory, if that is a region.
    pub(crate) region: &'a Path,
    /// The socket of its group's disk cache, if it has cached disks.
    pub(crate) cache: &'a Path,
    /// The NUMA node near which the kernel places its memory, while that has room.
    pub(crate) node: Option<u32>,
    /// Whether QEMU waits for an incoming migration.
    pub(crate) comes: bool,
}

impl VmSpec {
    /// The smallest step of a resize.
    pub const BLOCK: Bytes = Bytes::mib(2);

    /// Makes the specification of a guest with one emulated vCPU, and without disks and kernel.
    pub fn new(name: RegionName, memory: Bytes, backing: Backing) -> Self {
        Self {
            name,
            memory,
            max_memory: memory,
            backing,
            processors: Processors {
                cpus: 1,
                node: NodeChoice::Auto,
                accelerator: Accelerator::Tcg,
                cpu: None,
            },
            machine: "q35".to_owned(),
            disks: Vec::new(),
            cached_disks: Vec::new(),
            boot: Boot::default(),
            qemu: "qemu-system-x86_64".into(),
            preload: PathBuf::new(),
            extra: Vec::new(),
        }
    }

    /// Returns the memory that the VM can get beyond its size at boot.
    pub(crate) fn growth(&self) -> Bytes {
        self.max_memory.saturating_sub(self.memory)
    }

    /// Checks the specification.
    ///
    /// # Errors
    /// [`VmError::Misuse`] if a size or a combination is invalid, or an extra argument is
    /// refused.
    pub(crate) fn check(&self) -> Result<(), VmError> {
        let mib = Bytes::mib(1).0;
        if self.memory.0 == 0 || !self.memory.0.is_multiple_of(mib) {
            let why =
                format!("a VM's memory must be a multiple of 1MiB, and {} is not", self.memory);
            return Err(VmError::Misuse(why));
        }
        if self.max_memory < self.memory || !self.growth().0.is_multiple_of(Self::BLOCK.0) {
            let why = format!(
                "the maximum memory, {}, must be the {} at boot plus a multiple of {}",
                self.max_memory,
                self.memory,
                Self::BLOCK
            );
            return Err(VmError::Misuse(why));
        }
        if !self.cached_disks.is_empty() && self.backing != Backing::Region {
            let why = "cached disks need a group, and no VM with '--cache none' or huge pages is \
                       in one: omit these options, or use --disk";
            return Err(VmError::Misuse(why.to_owned()));
        }
        for argument in &self.extra {
            if let Some((_, why)) = UNFIT.iter().find(|(what, _)| is(argument, what)) {
                return Err(VmError::Misuse(format!("cannot pass '{argument}' to QEMU: {why}")));
            }
        }
        Ok(())
    }

    /// Builds the command that runs QEMU with this guest.
    pub(crate) fn command(&self, files: &Files, place: &Place<'_>) -> Command {
        let Self { name, memory, .. } = self;
        let Place { region, cache, comes, .. } = *place;
        let mut qemu = Command::new(&self.qemu);
        if self.backing == Backing::Region {
            qemu.env("LD_PRELOAD", &self.preload);
        }
        qemu.args(["-name", name.as_str(), "-nodefaults", "-no-user-config", "-display", "none"]);
        qemu.args(["-machine", &format!("{},memory-backend=ram", self.machine)]);
        self.processors.add_to(&mut qemu);
        if !self.extra.iter().any(|argument| is(argument, SANDBOX[0])) {
            qemu.args(SANDBOX);
        }
        qemu.arg("-object").arg(self.backend("ram", *memory, region, place.node));
        if self.growth() == Bytes::ZERO {
            qemu.args(["-m", &format!("{}M", memory.0 >> 20)]);
        } else {
            // Leaves room for the device's memory, aligned as QEMU may require.
            let room = memory.saturating_add(self.growth()).saturating_add(Bytes::gib(1));
            qemu.args(["-m", &format!("{}M,slots=1,maxmem={}M", memory.0 >> 20, room.0 >> 20)]);
            let window = self.window(region).unwrap_or_else(|| region.to_owned());
            qemu.arg("-object").arg(self.backend(GROWN, self.growth(), &window, place.node));
            let huge = self.huge().is_some();
            // With `prealloc`, a lack of huge pages shows when they are plugged, and not at the
            // first touch.
            let device = format!(
                "virtio-mem-pci,id={GROWTH},memdev={GROWN},node=0,requested-size=0,\
                 block-size={}M,prealloc={}",
                Self::BLOCK.0 >> 20,
                if huge { "on" } else { "off" }
            );
            qemu.args(["-device", &device]);
        }
        let socket = |id: &str| format!("socket,id=aquifer-{id},server=on,wait=off");
        let serial = [("path", &*files.serial()), ("logfile", &*files.console())];
        // QEMU must append, so that the supervisor can truncate the log: the guest prints without
        // bound.
        qemu.arg("-chardev").arg(with(socket("serial") + ",logappend=on", &serial));
        qemu.args(["-serial", "chardev:aquifer-serial"]);
        for (id, path) in
            [("control", files.control()), ("mover", files.mover()), ("qmp", files.qmp())]
        {
            qemu.arg("-chardev").arg(with(socket(id), &[("path", &path)]));
            qemu.args(["-mon", &format!("chardev=aquifer-{id},mode=control")]);
        }
        qemu.arg("-chardev").arg(with(socket("agent"), &[("path", &*files.agent())]));
        let port = format!("virtserialport,chardev=aquifer-agent,name={PORT}");
        qemu.args(["-device", "virtio-serial-pci,id=aquifer-ports", "-device", &port]);
        // Free page reporting returns the guest's free pages to lenders or to the host. With huge
        // pages, reporting is off: the kernel reserves none for a guest, so another process could
        // take freed ones.
        let reports = if self.huge().is_some() { "off" } else { "on" };
        let balloon = format!(
            "virtio-balloon-pci,id=aquifer-balloon,free-page-reporting={reports},deflate-on-oom=on"
        );
        qemu.args(["-device", &balloon]);
        for disk in &self.disks {
            let format = if is_qcow2(disk) { "qcow2" } else { "raw" };
            qemu.arg("-drive").arg(with(format!("if=virtio,format={format}"), &[("file", disk)]));
        }
        for (number, disk) in self.cached_disks.iter().enumerate() {
            cached_disk(&mut qemu, number, (disk, comes), cache);
        }
        let Boot { kernel, initrd, append } = &self.boot;
        for (option, value) in [("-kernel", kernel), ("-initrd", initrd)] {
            if let Some(value) = value {
                qemu.arg(option).arg(value);
            }
        }
        if let Some(append) = append {
            qemu.args(["-append", append]);
        }
        if comes {
            qemu.args(["-incoming", "defer", "-S"]);
        }
        qemu.args(&self.extra);
        qemu
    }

    /// Returns the path by which QEMU maps the part of the region that the guest can grow into.
    pub(crate) fn window(&self, region: &Path) -> Option<PathBuf> {
        (self.backing == Backing::Region && self.growth() > Bytes::ZERO)
            .then(|| window(region, self.memory.0))
            .flatten()
    }

    /// Returns the size of the huge pages that back the VM's memory, if it uses any.
    fn huge(&self) -> Option<Bytes> {
        match self.backing {
            Backing::Local { huge } => huge,
            Backing::Region => None,
        }
    }

    /// Returns the memory backend's argument. QEMU neither preallocates the memory nor dumps it
    /// with a core.
    fn backend(&self, id: &str, size: Bytes, region: &Path, node: Option<u32>) -> OsString {
        let near =
            node.map_or(String::new(), |node| format!(",host-nodes={node},policy=preferred"));
        let common = format!("id={id},size={},share=on,prealloc=off,dump=off{near}", size.0);
        match self.backing {
            Backing::Region => {
                // The kernel maps huge pages only at addresses that are multiples of their size.
                let common = format!("{common},align={HUGE_PAGE_SIZE}");
                with(format!("memory-backend-file,{common}"), &[("mem-path", region)])
            }
            Backing::Local { huge } => {
                let huge = huge
                    .map_or(String::new(), |page| format!(",hugetlb=on,hugetlbsize={}", page.0));
                // The kernel reserves the memory at boot, but not the memory that the VM may grow
                // by.
                let reserve = if id == GROWN { "off" } else { "on" };
                format!("memory-backend-memfd,{common},reserve={reserve}{huge}").into()
            }
        }
    }
}

/// Returns whether the disk's name says that its format is qcow2.
fn is_qcow2(disk: &Path) -> bool {
    disk.extension().is_some_and(|is| is == "qcow2")
}

/// How long QEMU waits for a killed disk cache to come back: practically for ever.
const RECONNECT_SECONDS: u32 = u32::MAX;

/// Adds a disk that QEMU reaches through the NBD server at the socket `cache`. While a VM `comes`
/// from another host, that host still writes to the disk.
fn cached_disk(qemu: &mut Command, number: usize, (disk, comes): (&Path, bool), cache: &Path) {
    let mut export = OsString::from(if comes { ARRIVING } else { "" });
    export.push(disk);
    let id = format!("aquifer-cached-{number}");
    let node = if is_qcow2(disk) { format!("{id}-file") } else { id.clone() };
    let options = format!(
        "driver=nbd,node-name={node},discard=unmap,server.type=unix,\
         reconnect-delay={RECONNECT_SECONDS}"
    );
    qemu.arg("-blockdev")
        .arg(with(options, &[("server.path", cache), ("export", export.as_ref())]));
    if node != id {
        qemu.args(["-blockdev", &format!("driver=qcow2,node-name={id},discard=unmap,file={node}")]);
    }
    qemu.args(["-device", &format!("virtio-blk-pci,drive={id}")]);
}

/// Returns whether an argument is this option, or has this value among its parts.
fn is(argument: &str, what: &str) -> bool {
    match (what.strip_prefix('-'), argument.strip_prefix('-')) {
        (Some(option), Some(given)) => given.trim_start_matches('-') == option,
        (Some(_), None) => false,
        (None, _) => argument.split(',').any(|value| {
            let value = ["type=", "driver="]
                .iter()
                .find_map(|key| value.strip_prefix(key))
                .unwrap_or(value);
            value.starts_with(what)
        }),
    }
}

/// Appends paths to an argument. A comma in a path is doubled, as QEMU requires.
fn with(argument: String, paths: &[(&str, &Path)]) -> OsString {
    let mut argument = argument.into_bytes();
    for (key, path) in paths {
        argument.extend(format!(",{key}=").bytes());
        for byte in path.as_os_str().as_bytes() {
            argument.extend(std::iter::repeat_n(*byte, if *byte == b',' { 2 } else { 1 }));
        }
    }
    OsString::from_vec(argument)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    fn spec(extra: &[&str]) -> VmSpec {
        VmSpec {
            disks: vec!["/a,b.qcow2".into(), "/c".into()],
            cached_disks: vec!["/d,e.qcow2".into(), "/f".into()],
            preload: "/lib/preload.so".into(),
            extra: extra.iter().map(|&word| word.to_owned()).collect(),
            ..VmSpec::new("one".parse().unwrap(), Bytes::mib(64), Backing::Region)
        }
    }

    fn place<'a>(region: &'a str, cache: &'a str) -> Place<'a> {
        Place { region: Path::new(region), cache: Path::new(cache), node: None, comes: false }
    }

    #[test]
    fn arguments_that_would_lose_memory_are_refused_with_a_reason() {
        for extra in [
            &["-m", "1G"][..],
            &["--machine", "pc"],
            &["-overcommit", "mem-lock=on"],
            &["-device", "vfio-pci,host=1"],
        ] {
            let refused = spec(extra).check().unwrap_err().to_string();
            assert!(refused.contains("to QEMU: "), "{refused}");
        }
        spec(&["-monitor", "stdio", "-nic", "user,model=virtio"]).check().unwrap();
        spec(&["-drive", "file=/disks/vfio.img"]).check().unwrap();
        assert!(spec(&["-netdev", "type=vhost-user,id=net"]).check().is_err());
        let odd = VmSpec { memory: Bytes(4096), ..spec(&[]) };
        assert!(odd.check().unwrap_err().to_string().contains("a multiple of 1MiB"));
    }

    #[test]
    fn a_vm_that_can_grow_has_a_device_for_that_and_no_other_has() {
        let files = Files::new(Path::new("/run/vms"), &"one".parse().unwrap());
        let arguments = |spec: &VmSpec| {
            spec.check().unwrap();
            let command = spec.command(&files, &place("/run/regions/one", "/run/nbd"));
            command
                .get_args()
                .map(|argument| argument.to_str().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        assert!(!arguments(&spec(&[])).iter().any(|argument| argument.contains("virtio-mem")));
        let large = VmSpec { max_memory: Bytes::mib(192), ..spec(&[]) };
        let pooled = arguments(&large);
        assert!(
            pooled.contains(
                &"memory-backend-file,id=growth,size=134217728,share=on,prealloc=off,dump=off,\
                  align=2097152,mem-path=/run/regions/.one/from-67108864"
                    .to_owned()
            ),
            "{pooled:?}"
        );
        let alone = VmSpec { backing: Backing::Local { huge: None }, ..large.clone() };
        assert!(alone.check().unwrap_err().to_string().contains("no VM with '--cache none'"));
        let local = arguments(&VmSpec { cached_disks: Vec::new(), ..alone });
        assert!(local.iter().all(|argument| !argument.contains("/run/regions")), "{local:?}");
        let odd = VmSpec { max_memory: Bytes::mib(65), ..large };
        assert!(odd.check().unwrap_err().to_string().contains("a multiple of 2MiB"));
    }

    #[test]
    fn a_qemu_is_in_its_sandbox_unless_the_operator_has_another() {
        let files = Files::new(Path::new("/run/vms"), &"one".parse().unwrap());
        let values = |spec: &VmSpec, option: &str| {
            let command = spec.command(&files, &place("/r", "/c"));
            let words: Vec<_> =
                command.get_args().map(|word| word.to_str().unwrap().to_owned()).collect();
            let given = words.iter().zip(&words[1..]).filter(|(word, _)| *word == option);
            given.map(|(_, value)| value.clone()).collect::<Vec<_>>()
        };
        assert_eq!(values(&spec(&[]), "-sandbox"), [SANDBOX[1]]);
        assert_eq!(values(&spec(&["-sandbox", "off"]), "-sandbox"), ["off"]);
        assert_eq!(values(&spec(&[]), "-cpu"), ["max,-erms,-fsrm"]);
        let mut model = spec(&[]);
        model.processors.cpu = Some("Nehalem".to_owned());
        assert_eq!(values(&model, "-cpu"), ["Nehalem,enforce"]);
        assert!(spec(&["-cpu", "Nehalem"]).check().is_err());
    }

    #[test]
    fn a_record_is_flat_and_refused_with_a_field_that_is_unknown() {
        let mut spec = spec(&[]);
        (spec.processors.node, spec.boot.append) = (NodeChoice::Any, Some("quiet".to_owned()));
        let mut record = serde_json::to_value(&spec).unwrap();
        assert_eq!((&record["cpus"], &record["append"]), (&1.into(), &"quiet".into()));
        assert_eq!(serde_json::from_value::<VmSpec>(record.clone()).unwrap(), spec);
        record["cpu_count"] = 1.into();
        let refused = serde_json::from_value::<VmSpec>(record).unwrap_err().to_string();
        assert!(refused.contains("cpu_count"), "{refused}");
    }

    #[test]
    fn a_comma_in_a_path_does_not_end_it() {
        let files = Files::new(Path::new("/run/vms"), &"one".parse().unwrap());
        let command = spec(&[]).command(&files, &place("/run/re,gions/one", "/run/n,bd"));
        let arguments: Vec<_> =
            command.get_args().map(|argument| argument.to_str().unwrap()).collect();
        assert!(arguments.contains(&"if=virtio,format=qcow2,file=/a,,b.qcow2"), "{arguments:?}");
        assert!(arguments.contains(&"if=virtio,format=raw,file=/c"), "{arguments:?}");
        let ends = |end: &str| arguments.iter().any(|argument| argument.ends_with(end));
        assert!(ends("server.path=/run/n,,bd,export=/d,,e.qcow2"), "{arguments:?}");
        assert!(
            ends("file=aquifer-cached-0-file") && ends("drive=aquifer-cached-1"),
            "{arguments:?}"
        );
        assert!(
            arguments.iter().any(|argument| argument.ends_with("mem-path=/run/re,,gions/one")),
            "{arguments:?}"
        );
    }
}
