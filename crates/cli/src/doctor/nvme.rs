//! The checks of the kernel's own NVMe over Fabrics, for `volume attach --direct` and `serve export
//! --kernel`.

use aquifer_blockdev::nvme::network::{self, ORDINARY_MTU};
use aquifer_blockdev::nvme::{Module, Root, Transport, target};

use super::{Check, Verdict};

pub(super) fn checks() -> Vec<Check> {
    checks_of(&Root::default())
}

fn checks_of(root: &Root) -> Vec<Check> {
    let mut checks = vec![
        part(root, "nvme-fabrics", "'aquifer volume attach --direct'"),
        part(root, "nvme-tcp", "'aquifer volume attach --direct nvme+tcp://'"),
        part(root, "nvme-rdma", "'aquifer volume attach --direct nvme+rdma://'"),
        kernel_target(root),
        part(root, "nvmet-tcp", "'aquifer serve export --kernel'"),
        part(root, "nvmet-rdma", "'aquifer serve export --kernel --rdma'"),
        ram(root),
        rdma(root),
    ];
    checks.extend(frames(root));
    checks
}

/// Checks a module that only commands given by hand need, so none is essential.
fn part(root: &Root, module: &str, of_use_for: &str) -> Check {
    match Module::find(root, module) {
        Module::Loaded => Check::ok(module, format!("loaded, for {of_use_for}")),
        Module::Available => Check::warn(
            module,
            format!("not loaded; {of_use_for} needs it"),
            format!("modprobe {module}"),
        ),
        Module::Missing => Check::missing(
            module,
            format!("the kernel does not have it; {of_use_for} needs it"),
            "use a distribution's kernel with all its modules",
        ),
    }
}

fn kernel_target(root: &Root) -> Check {
    let check = part(root, "nvmet", "'aquifer serve export --kernel'");
    if check.verdict == Verdict::Ok && target::check(root).is_err() {
        let found = "loaded, but configfs is not mounted; 'aquifer serve export --kernel' needs it";
        return Check::warn(check.name, found, "mount -t configfs none /sys/kernel/config");
    }
    check
}

fn ram(root: &Root) -> Check {
    const NAME: &str = "RAM disks";
    let find = |module| Module::find(root, module);
    match (find("zram"), find("brd")) {
        (Module::Loaded, _) => {
            Check::ok(NAME, "zram: 'aquifer serve export --kernel' uses one device for each export")
        }
        (Module::Available, _) => Check::warn(
            NAME,
            "zram is not loaded; 'aquifer serve export --kernel' needs it",
            "modprobe zram",
        ),
        (Module::Missing, Module::Loaded) => Check::warn(
            NAME,
            "only brd, which never frees the RAM of 'aquifer serve export --kernel'",
            "use a kernel with zram, or 'modprobe -r brd' after an export",
        ),
        (Module::Missing, Module::Available) => Check::warn(
            NAME,
            "no zram, and brd is not loaded; 'aquifer serve export --kernel' needs one of them",
            "modprobe brd rd_nr=1 rd_size=KIB",
        ),
        (Module::Missing, Module::Missing) => Check::missing(
            NAME,
            "neither zram nor brd; 'aquifer serve export --kernel' needs one of them",
            "use a kernel with zram",
        ),
    }
}

fn rdma(root: &Root) -> Check {
    const NAME: &str = "RDMA links";
    let soft = match Module::find(root, "rdma_rxe") {
        Module::Missing => "use a network card with RDMA, or a kernel with rdma_rxe (soft-RoCE)",
        _ => "soft-RoCE on any card: modprobe rdma_rxe; rdma link add rxe0 type rxe netdev DEV",
    };
    match network::rdma_links(root) {
        links if links.is_empty() => {
            let transport = Transport::Rdma;
            Check::missing(
                NAME,
                format!("none: no lending or attaching over {transport}; TCP needs none"),
                soft,
            )
        }
        links if links.iter().all(|link| link.starts_with("rxe")) => Check::warn(
            NAME,
            format!("{}: soft-RoCE does not reconnect after an interruption", links.join(", ")),
            "swap over nvme+tcp:// instead",
        ),
        links => Check::ok(NAME, links.join(", ")),
    }
}

/// Returns one check for each network over which swap may hang this host.
fn frames(root: &Root) -> Vec<Check> {
    const NAME: &str = "large frames";
    let dangers = network::dangers(root);
    if dangers.is_empty() {
        let found = format!(
            "no network has frames over {ORDINARY_MTU} bytes and too small a reserve for them"
        );
        return vec![Check::ok(NAME, found)];
    }
    dangers.iter().map(|danger| Check::warn(NAME, danger.why(), danger.help())).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn loaded_loadable_missing_and_dangerous_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in [
            ("proc/sys/kernel/osrelease", "6.1"),
            ("proc/sys/vm/min_free_kbytes", "1700"),
            ("lib/modules/6.1/modules.dep", "kernel/drivers/nvme/target/nvmet-tcp.ko:\n"),
            ("sys/module/nvme_tcp/refcnt", "0"),
            ("sys/module/nvmet/refcnt", "0"),
            ("sys/class/net/eth0/mtu", "9000"),
            ("sys/class/infiniband/rxe0/ports/1/state", "4: ACTIVE\n"),
        ] {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let checks = checks_of(&Root::at(dir.path()));
        for (name, verdict, part) in [
            ("nvme-tcp", Verdict::Ok, "attach --direct"),
            ("nvmet-tcp", Verdict::Warn, "modprobe nvmet-tcp"),
            ("nvmet", Verdict::Warn, "mount -t configfs"),
            ("nvme-rdma", Verdict::Missing, "the kernel does not have it"),
            ("RAM disks", Verdict::Missing, "neither"),
            ("RDMA links", Verdict::Warn, "rxe0/1 ACTIVE"),
            ("large frames", Verdict::Warn, "ip link set eth0 mtu 1500"),
        ] {
            let check = checks.iter().find(|check| check.name == name).unwrap();
            let text = format!("{} {:?}", check.found, check.help);
            assert!(check.verdict == verdict && text.contains(part), "{check:?}");
        }
    }
}
