//! Tests of defined VMs whose memory is elsewhere, or that move there, with two agents and QEMU.

use aquifer_api::status::Lent;

use super::Host;
use crate::common::{Export, serve, stderr, wait_until};

/// Two hosts with agents, and the lender of the VM's memory.
struct Scene {
    a: Host,
    b: Host,
    lender: Export,
}

impl Scene {
    fn new() -> Option<Self> {
        let hosts: [Host; 2] = Host::all(&["a", "b"])?.try_into().ok()?;
        let [a, b] = hosts;
        a.start_agent();
        b.start_agent();
        let socket = format!("unix:{}", a.dir.path().join("lender").display());
        let lender = serve(a.dir.path(), &["64M", "--nbd", &socket]);
        Some(Self { a, b, lender })
    }

    fn create(&self) {
        self.a.create(
            "db",
            &["--max-memory", "64M", "--cache", "64M", "--lender", self.lender.uri()],
        );
    }

    fn migrate(&self) -> std::process::Output {
        self.a.run(&["vm", "migrate", "db", "--to", "b"])
    }
}

#[test]
fn a_vm_that_moved_starts_at_its_new_host_only() {
    let Some(scene) = Scene::new() else { return };
    let Scene { a, b, .. } = &scene;
    scene.create();
    let text = std::fs::read_to_string(a.file("db")).unwrap();
    let moved_text = text.replace("\n[vm]", "moves = 1\n\n[vm]");
    let moved = scene.migrate();
    assert!(moved.status.success(), "{}", stderr(&moved));
    wait_until("the definition leaves a", || !a.file("db").exists());
    wait_until("b owns the definition", || {
        std::fs::read_to_string(b.file("db")).is_ok_and(|there| there == moved_text)
    });
    let qemu = b.wait_for_qemu("db");

    a.boot();
    a.start_agent();
    a.wait_for_periods();
    assert_eq!((a.qemu("db"), a.state("db")), (None, String::new()));
    assert_eq!(b.qemu("db"), Some(qemu));
    a.refused(&["vm", "start", "db"], "is not defined");

    super::kill(qemu);
    wait_until("b starts it again", || b.qemu("db").is_some_and(|again| again != qemu));
    b.boot();
    b.start_agent();
    b.wait_for_qemu("db");
    a.wait_for_periods();
    assert_eq!(a.qemu("db"), None);
}

#[test]
fn a_move_to_a_host_with_that_name_changes_nothing() {
    let Some(scene) = Scene::new() else { return };
    let Scene { a, b, .. } = &scene;
    scene.create();
    let qemu = a.wait_for_qemu("db");
    b.create("db", &["--no-start"]);
    let [here, there] = [a, b].map(|host| std::fs::read(host.file("db")).unwrap());
    let refused = scene.migrate();
    assert!(!refused.status.success());
    assert!(stderr(&refused).contains("defines VM 'db' already"), "{}", stderr(&refused));
    assert_eq!(a.qemu("db"), Some(qemu));
    assert_eq!([a, b].map(|host| std::fs::read(host.file("db")).unwrap()), [here, there]);
    assert_eq!(b.state("db"), "stopped");
}

#[test]
fn a_source_that_dies_in_a_move_starts_only_what_it_owns() {
    let Some(scene) = Scene::new() else { return };
    let Scene { a, b, .. } = &scene;
    scene.create();
    a.wait_for_qemu("db");
    let mut migrate = a.host.command().unwrap();
    migrate.args(["vm", "migrate", "db", "--to", "b"]);
    migrate.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    let mut migrate = migrate.spawn().unwrap();
    wait_until("b expects the VM", || b.file("db").exists());
    a.boot();
    let _ = migrate.wait();
    a.start_agent();
    let owns = |host: &Host| {
        std::fs::read_to_string(host.file("db")).is_ok_and(|text| !text.contains("[elsewhere]"))
    };
    a.wait_for_periods();
    assert!(!(owns(a) && owns(b)), "one definition at most starts the VM");
    match owns(a) {
        true => {
            a.wait_for_qemu("db");
            wait_until("b forgets the VM", || !b.file("db").exists());
            assert_eq!(b.qemu("db"), None);
        }
        false => assert_eq!(a.qemu("db"), None),
    }
}

#[test]
fn after_a_boot_a_vm_borrows_its_memory_anew() {
    let Some(scene) = Scene::new() else { return };
    let Scene { a, b, .. } = &scene;
    a.create("db", &["--max-memory", "64M", "--cache", "32M"]);
    let lent = || b.host.try_status().map(|status| status.loans.lent).unwrap_or_default();
    let [before] = lent().try_into().unwrap();
    assert_eq!(before.region.as_ref().map(ToString::to_string).as_deref(), Some("db"));
    // Until its grace ends, b keeps the lease of the host that booted.
    let is_new = |lease: &Lent| lease.region == before.region && lease.lease != before.lease;
    a.boot();
    a.start_agent();
    a.wait_for_qemu("db");
    assert_eq!(lent().iter().filter(|lease| is_new(lease)).count(), 1);
    a.done(&["vm", "rm", "db", "--force"]);
    wait_until("the new lease is back", || !lent().iter().any(is_new));
}
