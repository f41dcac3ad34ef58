//! Tests of targets against a directory that imitates configfs.

use std::fs;

use super::*;

/// Imitates a kernel with a target and zram, which gives the number 7 to a new device.
fn kernel() -> (tempfile::TempDir, Root) {
    let dir = tempfile::tempdir().unwrap();
    let root = Root::at(dir.path());
    fs::create_dir_all(root.path(configfs::SUBSYSTEMS)).unwrap();
    root.write("/sys/class/zram-control/hot_add", "7").unwrap();
    // Objects of another program.
    for dir in [
        "subsystems/nqn.2014-08.org.example:disk/namespaces/1",
        "ports/1/subsystems",
        "hosts/other",
    ] {
        fs::create_dir_all(root.path(Path::new(configfs::NVMET).join(dir))).unwrap();
    }
    (dir, root)
}

fn wish(host: &str) -> Wish {
    Wish {
        name: None,
        capacity: Bytes::mib(64),
        quota: Some(Bytes::mib(32)),
        ports: vec![
            (Transport::Tcp, "10.0.0.2:4420".parse().unwrap()),
            (Transport::Rdma, "[fd00::2]:4420".parse().unwrap()),
        ],
        allowed: vec![host.parse().unwrap()],
        secrets: None,
    }
}

const HOST: &str = "nqn.2014-08.org.example:h";

fn nvmet(root: &Root, dir: &str) -> Vec<String> {
    root.names(Path::new(configfs::NVMET).join(dir)).unwrap()
}

fn only_the_others_is_left(root: &Root) {
    assert_eq!(nvmet(root, "subsystems"), ["nqn.2014-08.org.example:disk"]);
    assert_eq!(
        (nvmet(root, "ports"), nvmet(root, "hosts")),
        (vec!["1".to_owned()], vec!["other".to_owned()])
    );
}

#[test]
fn a_subsystem_is_complete_and_gone_once_removed() {
    let (_dir, root) = kernel();
    let target = Target::make(&root, &wish(HOST)).unwrap();
    assert_eq!(target.device(), Path::new("/dev/zram7"));
    let read = |path: &str| root.read(Path::new(configfs::NVMET).join(path)).unwrap();
    let subsystem = format!("subsystems/{}", target.nqn());
    assert_eq!(read(&format!("{subsystem}/attr_allow_any_host")), "0");
    assert_eq!(read(&format!("{subsystem}/namespaces/1/device_path")), "/dev/zram7");
    assert_eq!(read(&format!("{subsystem}/namespaces/1/enable")), "1");
    assert_eq!(nvmet(&root, &format!("{subsystem}/allowed_hosts")), [HOST]);
    for (port, values) in [
        ("43264", ["tcp", "ipv4", "10.0.0.2", "4420"]),
        ("43265", ["rdma", "ipv6", "fd00::2", "4420"]),
    ] {
        let attributes = ["trtype", "adrfam", "traddr", "trsvcid"];
        assert_eq!(
            attributes.map(|attribute| read(&format!("ports/{port}/addr_{attribute}"))),
            values
        );
        assert_eq!(nvmet(&root, &format!("ports/{port}/subsystems")), [target.nqn().as_str()]);
    }
    assert_eq!(root.read("/sys/block/zram7/disksize").unwrap(), (64 << 20).to_string());
    assert_eq!(root.read("/sys/block/zram7/mem_limit").unwrap(), (32 << 20).to_string());

    target.remove().unwrap();
    only_the_others_is_left(&root);
    assert_eq!(root.read("/sys/block/zram7/reset").unwrap(), "1");
    assert_eq!(root.read("/sys/class/zram-control/hot_remove").unwrap(), "7");
}

#[test]
fn only_subsystems_of_dead_makers_are_swept() {
    let (_dir, root) = kernel();
    let living = Target::make(&root, &wish(HOST)).unwrap();
    let mut dead = Target::make(&root, &wish("nqn.2014-08.org.example:i")).unwrap();
    let gone = dead.nqn().clone();
    // Imitates the kernel, which releases the lock when a process is killed.
    dead.mark = None;
    drop(dead);
    assert!(nvmet(&root, "subsystems").contains(&gone.to_string()));

    assert_eq!(sweep(&root).unwrap(), [gone]);
    assert!(nvmet(&root, "subsystems").contains(&living.nqn().to_string()));
    assert_eq!(nvmet(&root, "ports"), ["1", "43264", "43265"]);
    assert_eq!(nvmet(&root, "hosts"), [HOST, "other"]);
    drop(living);
    only_the_others_is_left(&root);
    assert_eq!(sweep(&root).unwrap(), []);
}

#[test]
fn whatever_a_crash_interrupted_is_swept() {
    for made in [
        &["subsystems/NQN"][..],
        &["subsystems/NQN/allowed_hosts"],
        &["subsystems/NQN/namespaces/1"],
        &["subsystems/NQN/namespaces/1", "ports/43270"],
        &["ports/43519/subsystems"],
    ] {
        let (_dir, root) = kernel();
        let name = new_name();
        for dir in made {
            let dir = dir.replace("NQN", name.as_str());
            fs::create_dir_all(root.path(Path::new(configfs::NVMET).join(dir))).unwrap();
        }
        sweep(&root).unwrap();
        only_the_others_is_left(&root);
    }
}

#[test]
fn a_host_with_a_secret_is_somebody_elses() {
    let (_dir, root) = kernel();
    root.write(Path::new(HOSTS).join(HOST).join("dhchap_key"), "DHHC-1:00:a:").unwrap();
    Target::make(&root, &wish(HOST)).unwrap().remove().unwrap();
    assert_eq!(nvmet(&root, "hosts"), [HOST, "other"]);
}

#[test]
fn a_kernel_that_lacks_something_is_told_what() {
    let dir = tempfile::tempdir().unwrap();
    let root = Root::at(dir.path());
    assert_eq!(sweep(&root).unwrap(), [], "nothing can have been left");
    assert!(check(&root).unwrap_err().help.unwrap().contains("modprobe nvmet"));
    assert!(Target::make(&root, &wish(HOST)).unwrap_err().help.unwrap().contains("modprobe nvmet"));
    fs::create_dir_all(root.path("/sys/module/nvmet")).unwrap();
    assert!(
        Target::make(&root, &wish(HOST)).unwrap_err().help.unwrap().contains("mount -t configfs")
    );

    let (_dir, root) = kernel();
    fs::remove_file(root.path("/sys/class/zram-control/hot_add")).unwrap();
    assert!(Target::make(&root, &wish(HOST)).unwrap_err().help.unwrap().contains("modprobe zram"));
    only_the_others_is_left(&root);
}

#[test]
fn a_named_subsystem_lasts_until_it_is_found_and_removed() {
    let (_dir, root) = kernel();
    let name = |text: &str| text.parse::<Nqn>().unwrap();
    let (one, host) = (name("nqn.2014-08.org.example:one"), new_name());
    let secrets =
        HostSecrets { host: "DHHC-1:00:a:".to_owned(), target: "DHHC-1:00:b:".to_owned() };
    let lasting = Wish { name: Some(one.clone()), secrets: Some(secrets), ..wish(host.as_str()) };
    drop(Target::make(&root, &lasting).unwrap());
    assert_eq!(sweep(&root).unwrap(), [], "it is nobody's leavings");
    let key =
        |attribute: &str| root.read(Path::new(HOSTS).join(host.as_str()).join(attribute)).unwrap();
    assert_eq!([key("dhchap_key"), key("dhchap_ctrl_key")], ["DHHC-1:00:a:", "DHHC-1:00:b:"]);

    // A second target at the same addresses shares the ports.
    let other = name("nqn.2014-08.org.example:two");
    let second = Target::make(&root, &Wish { name: Some(other.clone()), ..wish(HOST) }).unwrap();
    assert_eq!(nvmet(&root, "ports"), ["1", "43264", "43265"]);
    second.remove().unwrap();
    assert!(Target::find(&root, &other).unwrap().is_none());

    root.write("/sys/block/zram7/mm_stat", "8192 100 4096 0 4096 0 0 0").unwrap();
    let found = Target::find(&root, &one).unwrap().unwrap();
    assert_eq!((found.device().to_str(), found.stored()), (Some("/dev/zram7"), Bytes(4096)));
    found.remove().unwrap();
    only_the_others_is_left(&root);
}

#[test]
fn an_unfinished_subsystem_is_not_found_and_is_removed() {
    for missing in ["namespaces/1/enable", "namespaces/1/device_path"] {
        let (_dir, root) = kernel();
        let name: Nqn = "nqn.2014-08.org.example:one".parse().unwrap();
        drop(Target::make(&root, &Wish { name: Some(name.clone()), ..wish(HOST) }).unwrap());
        fs::remove_file(
            root.path(Path::new(configfs::SUBSYSTEMS).join(name.as_str()).join(missing)),
        )
        .unwrap();
        assert!(Target::find(&root, &name).unwrap().is_none());
        only_the_others_is_left(&root);
    }
}
