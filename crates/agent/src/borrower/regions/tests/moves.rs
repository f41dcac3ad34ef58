//! Tests of regions that move with their VMs, by the records of both.

use aquifer_page::MigrationId;
use aquifer_vm::migrate::{HandedOver, Incoming};
use aquifer_vm::process::{Cause, Ended};
use serde_json::{Value, json};

use super::*;

/// A host's directories, with the region `items` and the record of its VM.
struct Host(tempfile::TempDir);

impl Host {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn regions(&self) -> PathBuf {
        self.0.path().join("regions")
    }

    fn vm(&self) -> PathBuf {
        self.0.path().join("vms/items")
    }

    /// Writes the records of the region and of its VM, which may arrive or leave.
    fn make(&self, incoming: Option<Incoming>, handed_over: Option<HandedOver>) {
        make(&self.regions(), VOLUME, vec![lease(1, true)]);
        fs::create_dir_all(self.vm()).unwrap();
        let origin = json!({"adopted": {"qmp": "/run/qmp", "agent": Value::Null}});
        let record = json!({
            "origin": origin, "pid": 1, "ended": Value::Null,
            "incoming": incoming, "handed_over": handed_over,
        });
        record::write(&self.vm().join("record.json"), &record).unwrap();
    }

    fn remove_vm(&self) {
        fs::remove_dir_all(self.vm()).unwrap();
    }

    fn remove_region(&self) {
        fs::remove_dir_all(self.regions()).unwrap();
    }

    fn open(&self) -> Regions {
        open(&self.regions(), Fake::Works)
    }
}

fn to_b() -> Option<HandedOver> {
    let (migration, to) = (MigrationId::random(), "b".parse().unwrap());
    Some(HandedOver { migration, to, left_at_source: None, defined: false })
}

fn from_a() -> Option<Incoming> {
    Some(Incoming {
        migration: MigrationId::random(),
        from: "a".parse().unwrap(),
        listen: [10, 0, 0, 2].into(),
        identity: PathBuf::from("/etc/tls"),
        prepared: true,
        left_at_source: None,
        cpu: None,
    })
}

fn spec() -> RegionSpec {
    let spec = RegionSpec::new(region(), Bytes::mib(64), Bytes::mib(1));
    RegionSpec { volume: VOLUME, leases: vec![lease(1, true)], ..spec }
}

#[test]
fn a_vm_that_is_handed_over_and_comes_back_has_its_leases() {
    let host = Host::new();
    host.make(None, None);
    let before = host.open();
    host.make(None, to_b());
    // The present agent and the next one keep the leases until the destination has confirmed.
    for regions in [&before, &host.open()] {
        assert_eq!((regions.moved(), regions.gone()), (vec![], vec![]));
        let [live] = &regions.live()[..] else { panic!("{:?}", regions.live()) };
        assert_eq!(live.leases[0].lease, LeaseId(1));
    }
    // 'vm resume --force' takes the hand-over back.
    host.make(None, None);
    for regions in [&before, &host.open()] {
        assert!(regions.has(VOLUME));
        assert_eq!((regions.moved(), regions.gone()), (vec![], vec![]));
    }
}

#[test]
fn a_vm_that_the_destination_has_leaves_its_leases_there() {
    let host = Host::new();
    host.make(None, to_b());
    let regions = host.open();
    let ended = Ended {
        name: region(),
        at_ms: 1,
        cause: Cause::Moved { to: "b".parse().unwrap() },
        status: None,
        words: String::new(),
    };
    record::write(&host.0.path().join("ended-vms.json"), &vec![ended]).unwrap();
    assert_eq!(regions.moved(), [], "the files are still here");
    host.remove_region();
    host.remove_vm();
    assert_eq!(regions.moved(), [(VOLUME, "b".parse().unwrap())]);
}

#[test]
fn a_failed_arrival_is_not_taken_for_a_region_that_came() {
    let host = Host::new();
    let regions = host.open();
    regions.expect_arrival(&spec());
    assert!(regions.arrived().0.is_empty());
    host.make(from_a(), None);
    assert!(regions.arrived().0.is_empty(), "it is the source's");
    // The files go one by one: the region's record is the last.
    host.remove_vm();
    assert_eq!(regions.arrived(), (vec![], vec![]));
    assert_eq!(regions.expected().len(), 1);
    host.remove_region();
    assert_eq!(regions.arrived(), (vec![], vec![VOLUME]));
    assert!(!regions.has(VOLUME));
}

#[test]
fn a_region_has_come_once_its_vm_is_this_host_s() {
    let host = Host::new();
    let regions = host.open();
    regions.expect_arrival(&spec());
    host.make(from_a(), None);
    assert!(regions.arrived().0.is_empty());
    host.make(None, None);
    let (arrived, missed) = regions.arrived();
    assert_eq!((arrived.len(), arrived[0].volume, missed), (1, VOLUME, vec![]));
    assert!(regions.has(VOLUME) && regions.expected().is_empty());
}
