//! What a guest is to be like, as QEMU's command line.

use std::ffi::OsString;
use std::fmt;
use std::io::Write as _;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

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

impl Accelerator {
    /// KVM where this QEMU starts a machine of this type under it, else emulation. (There are hosts with a `/dev/kvm` that QEMU cannot use.)
    pub fn find(qemu: &Path, machine: &str) -> Self {
        let mut probe = Command::new(qemu);
        probe.args(["-nodefaults", "-no-user-config", "-display", "none", "-machine", machine, "-S"]);
        probe.args(Self::Kvm.arguments()).args(["-qmp", "stdio"]);
        probe.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let quit = b"{\"execute\": \"qmp_capabilities\"}{\"execute\": \"quit\"}";
        let works = probe.spawn().and_then(|mut probe| {
            // One that has ended already says how by its exit code.
            let _ = probe.stdin.take().map(|mut to| to.write_all(quit));
            probe.wait()
        });
        if works.is_ok_and(|end| end.success()) { Self::Kvm } else { Self::Tcg }
    }

    /// QEMU's arguments for it, and for a processor with all that it can have then.
    pub fn arguments(self) -> [&'static str; 4] {
        match self {
            Self::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Self::Tcg => ["-accel", "tcg,thread=multi", "-cpu", "max"],
        }
    }
}

/// What a guest is to be like.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmSpec {
    /// Its name, and that of its region.
    pub name: RegionName,
    /// Its memory: whole MiB.
    pub memory: Bytes,
    /// Its processors.
    pub cpus: u32,
    /// What runs its code.
    pub accelerator: Accelerator,
    /// QEMU's machine type.
    pub machine: String,
    /// Files that are its disks; a name that ends in `.qcow2` is of that format, others are raw.
    pub disks: Vec<PathBuf>,
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
const UNFIT: [(&str, &str); 10] = [
    ("-m", "the size of the memory is that of the region"),
    ("-M", "the machine is given by its own option, and has the region as its memory"),
    ("-machine", "the machine is given by its own option, and has the region as its memory"),
    ("-accel", "the accelerator is given by its own option"),
    ("-incoming", "a VM comes to a host by 'aquifer vm migrate'"),
    ("-daemonize", "a VM is in the background always"),
    ("mem-lock=on", "locked memory cannot leave for the pool"),
    ("vfio", "a device of the host would write to pages that have left for the pool"),
    ("vhost-user", "another process would see what is not here as zeroes"),
    ("vhost-vdpa", "a device of the host would write to pages that have left for the pool"),
];

impl VmSpec {
    /// # Errors
    /// [`GuestError::Misuse`] for what cannot be.
    pub(crate) fn check(&self) -> Result<(), GuestError> {
        let mib = Bytes::mib(1).0;
        if self.memory.0 == 0 || !self.memory.0.is_multiple_of(mib) {
            let why = format!("a VM's memory is of whole MiB; {} is not", self.memory);
            return Err(GuestError::Misuse(why));
        }
        for argument in &self.extra {
            if let Some((_, why)) = UNFIT.iter().find(|(what, _)| is(argument, what)) {
                return Err(GuestError::Misuse(format!("QEMU cannot be given '{argument}': {why}")));
            }
        }
        Ok(())
    }

    /// QEMU with this guest, whose memory is the file `region`; one that waits for the guest to come from another host, if that is so.
    pub(crate) fn command(&self, files: &Files, region: &Path, comes: bool) -> Command {
        let Self { name, memory, .. } = self;
        let mut qemu = Command::new(&self.qemu);
        qemu.env("LD_PRELOAD", &self.shim);
        qemu.args(["-name", name.as_str(), "-nodefaults", "-no-user-config", "-display", "none"]);
        qemu.args(["-machine", &format!("{},memory-backend=ram", self.machine)]);
        qemu.args(self.accelerator.arguments());
        qemu.args(["-smp", &self.cpus.to_string(), "-m", &format!("{}M", memory.0 >> 20)]);
        // Not to be filled before it is used, nor dumped with QEMU: most of it is not here.
        let backend = format!("memory-backend-file,id=ram,size={},share=on,prealloc=off,dump=off", memory.0);
        qemu.arg("-object").arg(with(backend, &[("mem-path", region)]));
        let socket = |id| format!("socket,id=aquifer-{id},server=on,wait=off");
        let serial = [("path", &*files.serial()), ("logfile", &*files.console())];
        qemu.arg("-chardev").arg(with(socket("serial"), &serial));
        qemu.args(["-serial", "chardev:aquifer-serial"]);
        for (id, path) in [("control", files.control()), ("mover", files.mover()), ("qmp", files.qmp())] {
            qemu.arg("-chardev").arg(with(socket(id), &[("path", &path)]));
            qemu.args(["-mon", &format!("chardev=aquifer-{id},mode=control")]);
        }
        // What the guest does not need any more goes back to lenders.
        qemu.args([
            "-device",
            "virtio-balloon-pci,id=aquifer-balloon,free-page-reporting=on,deflate-on-oom=on",
        ]);
        for disk in &self.disks {
            let format = if disk.extension().is_some_and(|is| is == "qcow2") { "qcow2" } else { "raw" };
            qemu.arg("-drive").arg(with(format!("if=virtio,format={format}"), &[("file", disk)]));
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
}

/// Whether an argument is this option, or has this among its values.
fn is(argument: &str, what: &str) -> bool {
    match (what.strip_prefix('-'), argument.strip_prefix('-')) {
        (Some(option), Some(given)) => given.trim_start_matches('-') == option,
        (Some(_), None) => false,
        (None, _) => argument.split(',').any(|value| {
            let value = ["type=", "driver="].iter().find_map(|key| value.strip_prefix(key)).unwrap_or(value);
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
            cpus: 1,
            accelerator: Accelerator::Tcg,
            machine: "q35".to_owned(),
            disks: vec!["/a,b.qcow2".into(), "/c".into()],
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
    fn a_qemu_that_cannot_start_leaves_emulation() {
        assert_eq!(Accelerator::find(Path::new("/no/qemu"), "q35"), Accelerator::Tcg);
        assert_eq!(Accelerator::find(Path::new("/bin/false"), "q35"), Accelerator::Tcg);
    }

    #[test]
    fn a_comma_in_a_path_does_not_end_it() {
        let files = Files::new(Path::new("/run/vms"), &"one".parse().unwrap());
        let command = spec(&[]).command(&files, Path::new("/run/re,gions/one"), false);
        let arguments: Vec<_> = command.get_args().map(|argument| argument.to_str().unwrap()).collect();
        assert!(arguments.contains(&"if=virtio,format=qcow2,file=/a,,b.qcow2"), "{arguments:?}");
        assert!(arguments.contains(&"if=virtio,format=raw,file=/c"), "{arguments:?}");
        assert!(
            arguments.iter().any(|argument| argument.ends_with("mem-path=/run/re,,gions/one")),
            "{arguments:?}"
        );
    }
}
