//! Tests of leases over NVMe/TCP: content, losses, and access for the borrower only.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_api::message::Access;
use aquifer_api::path;
use aquifer_blockdev::process::client;
use aquifer_nvme::initiator::{Connection, NvmeError, Target};
use aquifer_nvme::proto::Nqn;
use aquifer_page::{Bytes, LeaseId};
use aquifer_transport::Address;
use aquifer_volume::Protocol;
use rustix::process::Signal;

use super::framework::{
    Cluster, Host, Identity, Load, STEP_TIMEOUT, Spec, lacks_rights, wait_until,
};

/// Starts a borrower `a` that swaps to a lender `b`, with `c` beside, and the load that swaps.
fn start_swapping(b: Spec, c: Spec) -> (Cluster, Load) {
    let a = Spec::new("a").memory(Bytes::mib(32)).set("borrow", "io_timeout", "20s").over_nvme();
    let cluster = Cluster::that_swaps([a, b, c]);
    let borrowed = cluster["a"].borrow(Bytes::mib(128));
    assert_eq!(borrowed.leases.len(), 1);
    let mut load = cluster["a"].load(Bytes::mib(48));
    load.filled();
    (cluster, load)
}

/// Returns the protocol of each lease of the one volume.
fn protocols(host: &Host) -> Vec<Protocol> {
    let record = client::record(&host.state(), host.volume().volume).unwrap();
    record.spec.leases.into_iter().map(|lease| lease.protocol).collect()
}

/// Returns the files of secrets that a borrower keeps.
fn secrets(host: &Host) -> Vec<PathBuf> {
    let files = fs::read_dir(host.state().join("secrets")).into_iter().flatten().flatten();
    files.map(|file| file.path()).collect()
}

#[track_caller]
fn give_back(cluster: &Cluster, load: &mut Load) {
    load.free();
    cluster["a"].give_back();
    wait_until("a, b and c are free", || {
        ["a", "b", "c"].iter().all(|host| cluster[host].is_free())
    });
    assert_eq!(secrets(&cluster["a"]), [] as [PathBuf; 0]);
}

#[test]
fn pages_travel_over_nvme_and_outlive_the_agents_of_both_sides() {
    if lacks_rights() {
        return;
    }
    let (cluster, mut load) =
        start_swapping(Spec::new("b").over_nvme(), Spec::new("c").set("lend", "enabled", false));
    let (a, lender) = (&cluster["a"], &cluster["b"]);
    assert!(lender.stored() > Bytes::mib(8), "{}", lender.stored());
    assert!(matches!(protocols(a)[..], [Protocol::Nvme(_)]), "{:?}", protocols(a));
    assert!(
        lender.lent().connections > Some(1),
        "there must be an admin queue and one queue for each worker"
    );
    let [file] = secrets(a).try_into().unwrap();
    assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
    for signal in [Signal::KILL, Signal::TERM] {
        load.rewrite_during(|| {
            lender.signal_agent(signal);
            lender.restart();
        });
        load.rewrite_during(|| {
            a.signal_agent(signal);
            a.restart();
        });
        assert!(matches!(protocols(a)[..], [Protocol::Nvme(_)]));
    }
    give_back(&cluster, &mut load);
}

#[test]
fn pages_of_an_overloaded_lender_move_to_another_lender() {
    if lacks_rights() {
        return;
    }
    let aside = Spec::new("c").set("lend", "enabled", false).over_nvme();
    let b = Spec::new("b").memory(Bytes::mib(224)).over_nvme();
    let (cluster, mut load) = start_swapping(b, aside);
    let (a, b, c) = (&cluster["a"], &cluster["b"], &cluster["c"]);
    let before = secrets(a);
    c.signal_agent(Signal::TERM);
    c.configure(|config| {
        config["lend"].as_table_mut().unwrap().insert("enabled".to_owned(), true.into());
    });
    c.restart();

    let mut own = b.load(Bytes::mib(184));
    load.rewrite_during(|| {
        own.filled();
        wait_until("b has its memory back", || b.lease_files().is_empty());
    });
    assert!(c.stored() > Bytes::mib(8), "{}", c.stored());
    assert!(matches!(protocols(a)[..], [Protocol::Nvme(_)]), "{:?}", protocols(a));
    let after = secrets(a);
    assert!(before.len() == 1 && after.len() == 1 && before != after, "{before:?} {after:?}");
    load.verify();
    own.free();
    give_back(&cluster, &mut load);
}

#[test]
fn a_lender_without_nvme_is_reached_by_nbd_over_tls() {
    if lacks_rights() {
        return;
    }
    let a = Spec::new("a").memory(Bytes::mib(32)).over_nvme();
    let cluster = Cluster::that_swaps([a, Spec::new("b")]);
    let a = &cluster["a"];
    a.borrow(Bytes::mib(64));
    assert!(matches!(protocols(a)[..], [Protocol::Nbd { secure: true, .. }]), "{:?}", protocols(a));
    a.give_back();
}

/// Connects to the subsystem of a lease.
fn open(
    lender: &Host,
    lease: LeaseId,
    host: &str,
    secrets: Option<&str>,
) -> Result<Connection, NvmeError> {
    let address = Address::Tcp { host: lender.nvme().ip().to_string(), port: lender.nvme().port() };
    let target = Target::new(address, Nqn::of_lease(lease), host.parse().unwrap());
    let secrets = secrets.map(|text| text.parse().unwrap());
    Connection::connect(Arc::new(Target { secrets, ..target }), STEP_TIMEOUT)
}

#[test]
fn a_subsystem_is_for_the_host_of_its_lease_and_for_nobody_else() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::that_swaps([Spec::new("a").over_nvme(), Spec::new("b").over_nvme()]);
    let (a, b) = (&cluster["a"], &cluster["b"]);
    let [lease] = a.borrow(Bytes::mib(64)).leases.try_into().unwrap();
    let own = Identity::load(&a.tls());
    let other = Identity::load(&cluster.admit("c"));

    let access: Access = serde_json::from_value(own.get(b, &path::access(lease)).unwrap()).unwrap();
    for (identity, lease) in [(&other, lease), (&own, LeaseId(7))] {
        let error = identity.get(b, &path::access(lease)).unwrap_err().to_string();
        assert!(error.contains("has no lease"), "{error}");
    }
    assert!(!format!("{access:?}").contains("DHHC"), "{access:?}");
    let given = access.secrets.unwrap();
    let both = format!("{}\n{}", given.borrower, given.lender);
    drop(open(b, lease, &access.host, Some(&both)).unwrap());

    let swapped = format!("{}\n{}", given.lender, given.borrower);
    let foreign = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-000000000001";
    for (host, secrets, why) in [
        (access.host.as_str(), None, "the target requires it"),
        (access.host.as_str(), Some(swapped.as_str()), "authentication failed"),
        (foreign, Some(both.as_str()), "there is no such subsystem"),
    ] {
        let error = open(b, lease, host, secrets).err().unwrap().to_string();
        assert!(error.contains(why), "{why}: {error}");
    }
    a.give_back();
    let error = open(b, lease, &access.host, Some(&both)).err().unwrap().to_string();
    assert!(error.contains("there is no such subsystem"), "{error}");
}

#[test]
fn an_agent_says_at_once_that_its_kernel_cannot_lend() {
    if lacks_rights() || Path::new("/sys/kernel/config/nvmet").exists() {
        return;
    }
    let cluster = Cluster::admitted([Spec::new("a").set("lend", "backend", "kernel").over_nvme()]);
    let a = &cluster["a"];
    let refusal = a.refusal();
    refusal.must_fail(1, &["backend = \"kernel\"", "modprobe nvmet-tcp"]);
}
