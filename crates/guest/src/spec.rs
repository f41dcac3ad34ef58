//! What a guest is to be like, as QEMU's command line.

use std::ffi::OsString;
use std::fmt;
use std::io::{BufRead as _, BufReader};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_inside::message::PORT;
use aquifer_mapping::window;
use aquifer_page::{Bytes, RegionName};
use serde::{Deserialize, Serialize};

use crate::error::GuestError;
use crate::process::Files;

/// What runs the guest's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// The processor, by `/dev/kvm`.
    Kvm,
    /// Emulation.
    Tcg,
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        })
    }
}

/// What SeaBIOS says in the end where there is nothing to boot from, and how long that may take.
const FIRMWARE_DONE: &str = "No bootable device";
const FIRMWARE: Duration = Duration::from_secs(5);

/// KVM that is this many times slower than emulation is of no use: a guest's kernel hangs there for minutes.
const OF_NO_USE: u32 = 3;

impl Accelerator {
    /// KVM where this QEMU runs a machine of this type under it as it should, else emulation. There are hosts with a `/dev/kvm` under which guests crawl
    /// (virtual ones above all), so what a machine does first, its firmware, is run by both: KVM needs about as long as emulation, or a part of it;
    /// where it is of no use, fifteen times as long.
    pub fn find(qemu: &Path, machine: &str) -> Self {
        let emulated = Self::Tcg.firmware_time(qemu, machine, FIRMWARE).unwrap_or(FIRMWARE);
        let bound = FIRMWARE.min(emulated * OF_NO_USE);
        if Self::Kvm.firmware_time(qemu, machine, bound).is_some() { Self::Kvm } else { Self::Tcg }
    }

    /// How long a machine's firmware takes until it finds nothing to boot from, if at most this long.
    fn firmware_time(self, qemu: &Path, machine: &str, bound: Duration) -> Option<Duration> {
        let mut probe = Command::new(qemu);
        probe.args([
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-machine",
            machine,
            "-m",
            "64",
        ]);
        probe.args(self.arguments());
        // Where SeaBIOS says what it does.
        probe.args([
            "-chardev",
            "stdio,id=said",
            "-device",
            "isa-debugcon,iobase=0x402,chardev=said",
        ]);
        probe.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let started = Instant::now();
        let mut probe = probe.spawn().ok()?;
        let said = probe.stdout.take();
        let (tell, told) = mpsc::channel();
        let reading = thread::spawn(move || {
            let lines = said.map(|said| BufReader::new(said).lines().map_while(Result::ok));
            let done = lines.into_iter().flatten().find(|line| line.contains(FIRMWARE_DONE));
            // Nobody waits for what is late.
            let _ = tell.send(done.map(|_| started.elapsed()));
        });
        let took = told.recv_timeout(bound).ok().flatten();
        let _ = probe.kill();
        let _ = probe.wait();
        let _ = reading.join();
        took
    }

    /// QEMU's arguments for it, and for a processor with all that it can have then.
    pub fn arguments(self) -> [&'static str; 4] {
        ["-accel", self.option(), "-cpu", self.cpu()]
    }

    fn option(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg,thread=multi",
        }
    }

    /// The argument of `-cpu` for it. An emulated processor does not offer fast `rep movsb` (ERMS,
    /// FSRM): QEMU emulates that byte by byte, so that kernels copy files four times slower.
    fn cpu(self) -> &'static str {
        match self {
            Self::Kvm => "host",
            Self::Tcg => "max,-erms,-fsrm",
        }
    }

    /// What QEMU calls a processor with all that there can be here.
    fn whole_cpu(self) -> &'static str {
        match self {
            Self::Kvm => "host",
            Self::Tcg => "max",
        }
    }
}

/// Where a guest's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Backing {
    /// In a region: in the pool, with local RAM as its cache.
    Region,
    /// In RAM of its host.
    Local {
        /// In pages of this size that the host has set aside (hugetlbfs), if not in ordinary ones.
        huge: Option<Bytes>,
    },
}

/// What a guest is to be like.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmSpec {
    /// Its name, and that of its region.
    pub name: RegionName,
    /// Its memory when it boots: whole MiB.
    pub memory: Bytes,
    /// What it can grow to: `memory`, and whole [`Self::BLOCK`]s beyond.
    pub max_memory: Bytes,
    /// Where that is.
    pub backing: Backing,
    /// Its processors.
    pub cpus: u32,
    /// What runs its code.
    pub accelerator: Accelerator,
    /// The processor that it sees, as QEMU's `-cpu` takes it: one that the host must offer all of. Where that is not given it sees all that the host
    /// offers, and can move only to a host that offers as much.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// QEMU's machine type.
    pub machine: String,
    /// Files that are its disks; a name that ends in `.qcow2` is of that format, others are raw.
    pub disks: Vec<PathBuf>,
    /// Further ones, after those, that it has through the cache of its group.
    #[serde(default)]
    pub cached_disks: Vec<PathBuf>,
    /// A kernel to boot, in place of what is on the first disk.
    pub kernel: Option<PathBuf>,
    /// What that kernel finds as its first file system.
    pub initrd: Option<PathBuf>,
    /// What that kernel is told.
    pub append: Option<String>,
    /// QEMU itself.
    pub qemu: PathBuf,
    /// The library that lends it its region.
    pub shim: PathBuf,
    /// More of QEMU's arguments.
    pub extra: Vec<String>,
}

/// Arguments that cannot be, and why.
const UNFIT: [(&str, &str); 11] = [
    ("-m", "the size of the memory is that of the region"),
    ("-M", "the machine is given by its own option, and has the region as its memory"),
    ("-machine", "the machine is given by its own option, and has the region as its memory"),
    ("-accel", "the accelerator is given by its own option"),
    (
        "-cpu",
        "the processor is given by its own option, so that it is known where the VM can move to",
    ),
    ("-incoming", "a VM comes to a host by 'aquifer vm migrate'"),
    ("-daemonize", "a VM is in the background always"),
    ("mem-lock=on", "locked memory cannot leave for the pool"),
    ("vfio", "a device of the host would write to pages that have left for the pool"),
    ("vhost-user", "another process would see what is not here as zeroes"),
    ("vhost-vdpa", "a device of the host would write to pages that have left for the pool"),
];

/// What keeps a guest that has broken into QEMU from starting programs, becoming somebody else and taking more of the host. Arguments of the operator's own
/// take its place.
const SANDBOX: [&str; 2] =
    ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"];

/// The device by which the memory of a VM is resized, as QEMU knows it.
const GROWTH: &str = "aquifer-growth";

/// The memory that it has for that.
const GROWN: &str = "growth";

impl VmSpec {
    /// The least by which a VM is resized.
    pub const BLOCK: Bytes = Bytes::mib(2);

    /// The model of processor that stands for all that its host offers, if the VM has that.
    pub(crate) fn whole_cpu(&self) -> Option<&'static str> {
        self.cpu.is_none().then(|| self.accelerator.whole_cpu())
    }

    /// What it can have beyond what it boots with.
    pub(crate) fn growth(&self) -> Bytes {
        self.max_memory.saturating_sub(self.memory)
    }

    /// # Errors
    /// [`GuestError::Misuse`] for what cannot be.
    pub(crate) fn check(&self) -> Result<(), GuestError> {
        let mib = Bytes::mib(1).0;
        if self.memory.0 == 0 || !self.memory.0.is_multiple_of(mib) {
            let why = format!("a VM's memory is of whole MiB; {} is not", self.memory);
            return Err(GuestError::Misuse(why));
        }
        if self.max_memory < self.memory || !self.growth().0.is_multiple_of(Self::BLOCK.0) {
            let why = format!(
                "a VM grows by whole {}; from {} to {} are no such",
                Self::BLOCK,
                self.memory,
                self.max_memory
            );
            return Err(GuestError::Misuse(why));
        }
        if !self.cached_disks.is_empty() && self.backing != Backing::Region {
            let why = "disks are cached for a group, and only a VM in the pool is in one: have its memory be there (--cache, --group), or its disks be its own (--disk)";
            return Err(GuestError::Misuse(why.to_owned()));
        }
        for argument in &self.extra {
            if let Some((_, why)) = UNFIT.iter().find(|(what, _)| is(argument, what)) {
                return Err(GuestError::Misuse(format!(
                    "QEMU cannot be given '{argument}': {why}"
                )));
            }
        }
        Ok(())
    }

    /// QEMU with this guest, whose memory is the file `region`, and whose group has its disks cached at the socket `cache`; one that waits for the guest to
    /// come from another host, if that is so.
    pub(crate) fn command(
        &self,
        files: &Files,
        region: &Path,
        cache: &Path,
        comes: bool,
    ) -> Command {
        let Self { name, memory, .. } = self;
        let mut qemu = Command::new(&self.qemu);
        if self.backing == Backing::Region {
            qemu.env("LD_PRELOAD", &self.shim);
        }
        qemu.args(["-name", name.as_str(), "-nodefaults", "-no-user-config", "-display", "none"]);
        qemu.args(["-machine", &format!("{},memory-backend=ram", self.machine)]);
        qemu.args(["-accel", self.accelerator.option()]);
        // A model that the host does not offer in full keeps QEMU from starting.
        let cpu = self.cpu.as_ref().map(|model| format!("{model},enforce"));
        qemu.args(["-cpu", cpu.as_deref().unwrap_or(self.accelerator.cpu())]);
        if !self.extra.iter().any(|argument| is(argument, SANDBOX[0])) {
            qemu.args(SANDBOX);
        }
        qemu.args(["-smp", &self.cpus.to_string()]);
        qemu.arg("-object").arg(self.backend("ram", *memory, region));
        if self.growth() == Bytes::ZERO {
            qemu.args(["-m", &format!("{}M", memory.0 >> 20)]);
        } else {
            // Room for the device's memory, aligned as QEMU may want it.
            let room = memory.saturating_add(self.growth()).saturating_add(Bytes::gib(1));
            qemu.args(["-m", &format!("{}M,slots=1,maxmem={}M", memory.0 >> 20, room.0 >> 20)]);
            let window = self.window(region).unwrap_or_else(|| region.to_owned());
            qemu.arg("-object").arg(self.backend(GROWN, self.growth(), &window));
            let huge = self.huge().is_some();
            // Memory that cannot be had is found to be so when it is added, and not when it is touched.
            let device = format!(
                "virtio-mem-pci,id={GROWTH},memdev={GROWN},node=0,requested-size=0,block-size={}M,prealloc={}",
                Self::BLOCK.0 >> 20,
                if huge { "on" } else { "off" }
            );
            qemu.args(["-device", &device]);
        }
        let socket = |id: &str| format!("socket,id=aquifer-{id},server=on,wait=off");
        let serial = [("path", &*files.serial()), ("logfile", &*files.console())];
        // What QEMU appends to can be emptied under it: the guest says as much as it likes.
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
        // What the guest does not need any more goes back to lenders, or the host. Not where others could take it: nothing is promised of huge pages
        // but what is there.
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
            cached_disk(&mut qemu, number, disk, cache);
        }
        for (option, value) in [("-kernel", &self.kernel), ("-initrd", &self.initrd)] {
            if let Some(value) = value {
                qemu.arg(option).arg(value);
            }
        }
        if let Some(append) = &self.append {
            qemu.args(["-append", append]);
        }
        if comes {
            qemu.args(["-incoming", "defer", "-S"]);
        }
        qemu.args(&self.extra);
        qemu
    }

    /// By what name QEMU maps the part of the region that the guest can grow by.
    pub(crate) fn window(&self, region: &Path) -> Option<PathBuf> {
        (self.backing == Backing::Region && self.growth() > Bytes::ZERO)
            .then(|| window(region, self.memory.0))
            .flatten()
    }

    /// The size of the huge pages that its memory is in, if it is.
    fn huge(&self) -> Option<Bytes> {
        match self.backing {
            Backing::Local { huge } => huge,
            Backing::Region => None,
        }
    }

    /// What QEMU makes memory of. Not to be filled before it is used, nor dumped with QEMU.
    fn backend(&self, id: &str, size: Bytes, region: &Path) -> OsString {
        let common = format!("id={id},size={},share=on,prealloc=off,dump=off", size.0);
        match self.backing {
            Backing::Region => {
                with(format!("memory-backend-file,{common}"), &[("mem-path", region)])
            }
            Backing::Local { huge } => {
                let huge = huge
                    .map_or(String::new(), |page| format!(",hugetlb=on,hugetlbsize={}", page.0));
                // What it may grow by is no promise of the kernel's; what it boots with is.
                let reserve = if id == GROWN { "off" } else { "on" };
                format!("memory-backend-memfd,{common},reserve={reserve}{huge}").into()
            }
        }
    }
}

/// By its name.
fn is_qcow2(disk: &Path) -> bool {
    disk.extension().is_some_and(|is| is == "qcow2")
}

/// How long a guest waits for the cache of its disks when that was killed: for ever.
const RECONNECT_SECONDS: u32 = u32::MAX;

/// Has QEMU have a disk through the cache that serves at a socket.
fn cached_disk(qemu: &mut Command, number: usize, disk: &Path, cache: &Path) {
    let id = format!("aquifer-cached-{number}");
    let node = if is_qcow2(disk) { format!("{id}-file") } else { id.clone() };
    let options = format!(
        "driver=nbd,node-name={node},discard=unmap,server.type=unix,reconnect-delay={RECONNECT_SECONDS}"
    );
    qemu.arg("-blockdev").arg(with(options, &[("server.path", cache), ("export", disk)]));
    if node != id {
        qemu.args(["-blockdev", &format!("driver=qcow2,node-name={id},discard=unmap,file={node}")]);
    }
    qemu.args(["-device", &format!("virtio-blk-pci,drive={id}")]);
}

/// Whether an argument is this option, or has this among its values.
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

/// An argument with paths in it, as QEMU reads it: a comma in a path is written twice.
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
            name: "one".parse().unwrap(),
            memory: Bytes::mib(64),
            max_memory: Bytes::mib(64),
            backing: Backing::Region,
            cpus: 1,
            accelerator: Accelerator::Tcg,
            cpu: None,
            machine: "q35".to_owned(),
            disks: vec!["/a,b.qcow2".into(), "/c".into()],
            cached_disks: vec!["/d,e.qcow2".into(), "/f".into()],
            kernel: None,
            initrd: None,
            append: None,
            qemu: "qemu-system-x86_64".into(),
            shim: "/lib/shim.so".into(),
            extra: extra.iter().map(|&word| word.to_owned()).collect(),
        }
    }

    #[test]
    fn what_would_lose_memory_is_refused_with_the_reason() {
        for extra in [
            &["-m", "1G"][..],
            &["--machine", "pc"],
            &["-overcommit", "mem-lock=on"],
            &["-device", "vfio-pci,host=1"],
        ] {
            let refused = spec(extra).check().unwrap_err().to_string();
            assert!(refused.contains("QEMU cannot be given"), "{refused}");
        }
        spec(&["-monitor", "stdio", "-nic", "user,model=virtio"]).check().unwrap();
        spec(&["-drive", "file=/disks/vfio.img"]).check().unwrap();
        assert!(spec(&["-netdev", "type=vhost-user,id=net"]).check().is_err());
        let odd = VmSpec { memory: Bytes(4096), ..spec(&[]) };
        assert!(odd.check().unwrap_err().to_string().contains("whole MiB"));
    }

    #[test]
    fn a_vm_that_can_grow_has_a_device_for_that_and_no_other_has() {
        let files = Files::new(Path::new("/run/vms"), &"one".parse().unwrap());
        let arguments = |spec: &VmSpec| {
            spec.check().unwrap();
            let command =
                spec.command(&files, Path::new("/run/regions/one"), Path::new("/run/nbd"), false);
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
                &"memory-backend-file,id=growth,size=134217728,share=on,prealloc=off,dump=off,mem-path=/run/regions/.one/from-67108864".to_owned()
            ),
            "{pooled:?}"
        );
        let alone = VmSpec { backing: Backing::Local { huge: None }, ..large.clone() };
        assert!(alone.check().unwrap_err().to_string().contains("only a VM in the pool is in one"));
        let local = arguments(&VmSpec { cached_disks: Vec::new(), ..alone });
        assert!(local.iter().all(|argument| !argument.contains("/run/regions")), "{local:?}");
        let odd = VmSpec { max_memory: Bytes::mib(65), ..large };
        assert!(odd.check().unwrap_err().to_string().contains("whole 2MiB"));
    }

    #[test]
    fn a_qemu_is_in_its_sandbox_unless_the_operator_has_another() {
        let files = Files::new(Path::new("/run/vms"), &"one".parse().unwrap());
        let values = |spec: &VmSpec, option: &str| {
            let command = spec.command(&files, Path::new("/r"), Path::new("/c"), false);
            let words: Vec<_> =
                command.get_args().map(|word| word.to_str().unwrap().to_owned()).collect();
            let given = words.iter().zip(&words[1..]).filter(|(word, _)| *word == option);
            given.map(|(_, value)| value.clone()).collect::<Vec<_>>()
        };
        assert_eq!(values(&spec(&[]), "-sandbox"), [SANDBOX[1]]);
        assert_eq!(values(&spec(&["-sandbox", "off"]), "-sandbox"), ["off"]);
        assert_eq!(values(&spec(&[]), "-cpu"), ["max,-erms,-fsrm"]);
        let model = VmSpec { cpu: Some("Nehalem".to_owned()), ..spec(&[]) };
        assert_eq!(values(&model, "-cpu"), ["Nehalem,enforce"]);
        assert!(spec(&["-cpu", "Nehalem"]).check().is_err());
    }

    #[test]
    fn a_qemu_that_cannot_start_leaves_emulation() {
        assert_eq!(Accelerator::find(Path::new("/no/qemu"), "q35"), Accelerator::Tcg);
        assert_eq!(Accelerator::find(Path::new("/bin/false"), "q35"), Accelerator::Tcg);
    }

    #[test]
    fn a_comma_in_a_path_does_not_end_it() {
        let files = Files::new(Path::new("/run/vms"), &"one".parse().unwrap());
        let command = spec(&[]).command(
            &files,
            Path::new("/run/re,gions/one"),
            Path::new("/run/n,bd"),
            false,
        );
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
