//! Tests that `aquifer doctor` is right: they compare each check with the host itself, and follow
//! the advice, which must help.

use std::path::Path;

use anyhow::{Context as _, Result};
use aquifer_hosts::daemon::EXPORT;
use aquifer_page::Bytes;
use aquifer_testbed::{Host, Kernel, Shell as _, Spec, Testbed, quoted};
use serde_json::Value;

use crate::support::{TIMEOUT, aquifer, daemon, step, tool};

/// Modules that the host can load; none is loaded at first.
const MODULES: [&str; 9] = [
    "fuse",
    "loop",
    "nbd",
    "zram",
    "nvme-fabrics",
    "nvme-tcp",
    "nvme-rdma",
    "nvmet-tcp",
    "nvmet-rdma",
];

/// First and last part of a command that attaches a device of a backend and detaches it.
const ATTACH: &str = "d=$(aquifer volume attach 'nbd+unix:///?socket=/run/export.sock'";
const DETACH: &str = ") && test -b $d && aquifer volume detach $d";

const READ_CAPABILITIES: &str = "awk '/^CapEff/ { print \"0x\" $2 }' /proc/self/status";

#[test]
fn of_kernel_6_1_is_right() -> Result<()> {
    check_doctor(Kernel::V6_1, &MODULES, "nbd")
}

#[test]
fn of_kernel_6_12_is_right() -> Result<()> {
    check_doctor(Kernel::V6_12, &[&MODULES[..], &["ublk_drv"]].concat(), "ublk")
}

/// Begins with a host without drivers and ends with all of `modules` loaded, where volumes use
/// `backend`.
fn check_doctor(kernel: Kernel, modules: &[&str], backend: &str) -> Result<()> {
    let spec = Spec::new("host").kernel(kernel).memory(Bytes::mib(512));
    let hosts = Testbed::start([spec
        .file(aquifer(), "/bin/aquifer")
        .file(tool("setpriv"), "/bin/setpriv")])?;
    let host = &hosts.hosts()[0];
    install(host, kernel, modules)?;
    let export =
        host.spawn(&daemon(EXPORT, "128M --nbd unix:/run/export.sock --dir /run/export"))?;
    export.wait_for("exporting", TIMEOUT)?;

    step("nothing is loaded");
    let report = DoctorReport::of(host, "")?;
    report.is_true()?;
    assert!(!report.able(), "doctor must find no way to make a block device");

    step("all available modules are loaded");
    let mut done = Vec::new();
    while let Some(advice) =
        DoctorReport::of(host, "")?.advice().find(|advice| advice.starts_with("modprobe "))
    {
        assert!(!done.contains(&advice.to_owned()), "'{advice}' does not help");
        host.sh(advice)?;
        done.push(advice.to_owned());
    }
    DoctorReport::of(host, "")?.follow("nvmet")?;
    let report = DoctorReport::of(host, "")?;
    report.is_true()?;
    assert!(report.able());
    assert_eq!(report.check("block device")?["found"], format!("{backend} would be used"));
    let left: Vec<_> = report.advice().filter(|advice| advice.contains("modprobe")).collect();
    // No card has RDMA, so that advice stays: it takes more than a module.
    assert_eq!(left.len(), 1, "{left:?}");

    for (spoil, name) in [
        ("umount /dev/shm", "/dev/shm"),
        ("mount -o remount,size=64M /dev/shm", "/dev/shm"),
        ("sysctl -w vm.overcommit_memory=2", "overcommit"),
        ("ip link set eth0 mtu 9000", "large frames"),
    ] {
        step(spoil);
        host.sh(spoil)?;
        let report = DoctorReport::of(host, "")?;
        report.is_true_of(name)?;
        assert_ne!(report.check(name)?["verdict"], "ok");
        report.follow(name)?;
        let report = DoctorReport::of(host, "")?;
        report.is_true_of(name)?;
        assert_eq!(report.check(name)?["verdict"], "ok");
    }

    step("with fewer privileges");
    let weak = DoctorReport::of(host, "/bin/setpriv --bounding-set -sys_resource,-ipc_lock")?;
    weak.is_true()?;
    assert!(weak.able());
    assert_eq!(weak.not_ok_of(&["swap path", "locked memory"]), 2);
    let nobody = DoctorReport::of(host, "/bin/setpriv --reuid 65534 --regid 65534 --clear-groups")?;
    assert!(!nobody.able());
    let names = [
        "root",
        "swap path",
        "locked memory",
        "block device",
        "backend ublk",
        "backend nbd",
        "backend fuse-loop",
    ];
    assert_eq!(nobody.not_ok_of(&names), names.len());
    Ok(())
}

/// Puts modules where modprobe looks for them.
fn install(host: &Host, kernel: Kernel, modules: &[&str]) -> Result<()> {
    let kernel = kernel.prepare()?;
    let vmlinux = kernel.vmlinux();
    let root = vmlinux.parent().context("vmlinux has no parent directory")?;
    let list = format!("lib/modules/{}/modules.dep", kernel.release());
    host.push(&root.join(&list), &format!("/{list}"))?;
    for module in modules {
        for file in kernel.modules().files(module)? {
            let there = Path::new("/").join(file.strip_prefix(root)?);
            host.push(&file, &there.to_string_lossy())?;
        }
    }
    Ok(())
}

/// The report of `aquifer doctor`.
struct DoctorReport<'a> {
    host: &'a Host,
    /// The command under which doctor ran, which may take privileges away.
    under: &'a str,
    said: Value,
}

impl<'a> DoctorReport<'a> {
    fn of(host: &'a Host, under: &'a str) -> Result<Self> {
        let output = host.run(&format!("{under} aquifer doctor --json"))?;
        let said: Value = serde_json::from_str(&output.stdout).context(output.stderr)?;
        assert_eq!(output.code, i32::from(said["able"] == false));
        Ok(Self { host, under, said })
    }

    fn able(&self) -> bool {
        self.said["able"] == true
    }

    fn checks(&self) -> impl Iterator<Item = &Value> {
        self.said["checks"].as_array().into_iter().flatten()
    }

    fn check(&self, name: &str) -> Result<&Value> {
        self.checks()
            .find(|check| check["name"] == name)
            .with_context(|| format!("no check of {name}"))
    }

    fn advice(&self) -> impl Iterator<Item = &str> {
        self.checks().filter_map(|check| check["help"].as_str())
    }

    /// Follows the first advice of the check `name`.
    fn follow(&self, name: &str) -> Result<()> {
        let advice =
            self.check(name)?["help"].as_str().with_context(|| format!("no advice on {name}"))?;
        self.host.sh(advice.split(", or").next().unwrap_or(advice)).map(drop)
    }

    /// Counts the checks among `names` that are not ok.
    fn not_ok_of(&self, names: &[&str]) -> usize {
        self.checks()
            .filter(|check| {
                names.iter().any(|name| check["name"] == *name) && check["verdict"] != "ok"
            })
            .count()
    }

    /// Compares each check with the host itself.
    fn is_true(&self) -> Result<()> {
        self.checks()
            .try_for_each(|check| self.is_true_of(check["name"].as_str().unwrap_or_default()))
    }

    fn is_true_of(&self, name: &str) -> Result<()> {
        let check = self.check(name)?;
        let command = quoted(&truth_command(name)?);
        let truth = self.host.run(&format!("{} sh -c {command}", self.under))?;
        assert_eq!(check["verdict"] == "ok", truth.success(), "{check}: {truth:?}");
        Ok(())
    }
}

/// Returns a command that succeeds if the check `name` should be ok.
fn truth_command(name: &str) -> Result<String> {
    let is_loaded = |module: &str| format!("test -d /sys/module/{}", module.replace('-', "_"));
    Ok(match name {
        "root" => "test $(id -u) = 0".to_owned(),
        "swap path" => "echo -1000 >/proc/self/oom_score_adj".to_owned(),
        "kernel" => "uname -r | grep -E '^6[.](1|12)[.]'".to_owned(),
        "memory cgroup" => "grep -w memory /sys/fs/cgroup/cgroup.controllers".to_owned(),
        "swap accounting" => {
            "cd /sys/fs/cgroup && echo +memory >cgroup.subtree_control && mkdir one \
             && ls one/memory.swap.max; s=$?; rmdir one; exit $s"
                .to_owned()
        }
        "pressure" => "grep some /proc/pressure/memory".to_owned(),
        "/dev/shm" => "awk '$2 == \"/dev/shm\" { print $3 }' /proc/mounts | grep tmpfs \
             && total=$(awk '/MemTotal/ { print $2 }' /proc/meminfo) \
             && test $(df -k /dev/shm | awk 'END { print $2 }') -ge $((total / 8 * 4))"
            .to_owned(),
        "locked memory" => format!(
            "test $(ulimit -l) = unlimited || test $(($({READ_CAPABILITIES}) >> 14 & 1)) = 1"
        ),
        // Regions need Linux 6.7.
        "regions" => "test $(id -u) = 0 && uname -r | grep -E '^6[.]12[.]'".to_owned(),
        "overcommit" => "test $(cat /proc/sys/vm/overcommit_memory) != 2".to_owned(),
        "swap" => "test -e /proc/swaps".to_owned(),
        "block device" => format!("{ATTACH} {DETACH}"),
        "damon" => "! grep -qsx on /sys/kernel/mm/damon/admin/kdamonds/*/state \
             && ! grep -qsx Y /sys/module/damon_*/parameters/enabled"
            .to_owned(),
        "qemu" => "command -v qemu-system-x86_64".to_owned(),
        "nvmet" => "test -d /sys/kernel/config/nvmet".to_owned(),
        "RAM disks" => "test -e /sys/class/zram-control/hot_add".to_owned(),
        "RDMA links" => "ls /sys/class/infiniband | grep .".to_owned(),
        "large frames" => "test $(cat /sys/class/net/eth0/mtu) -le 1500 \
             || test $(cat /proc/sys/vm/min_free_kbytes) -ge 16384"
            .to_owned(),
        _ => match name.strip_prefix("backend ") {
            Some(kind) => format!("{ATTACH} --backend {kind} {DETACH}"),
            None => is_loaded(name),
        },
    })
}
