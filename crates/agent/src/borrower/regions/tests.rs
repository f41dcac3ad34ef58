//! Tests of regions with borrowed leases, on records without engines.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;

use aquifer_page::OwnerId;
use aquifer_region::process::record;
use aquifer_transport::Address;
use aquifer_volume::{DiskCopies, Protocol, SecondCopy, SpillFile};

use super::*;

mod moves;

const VOLUME: VolumeId = VolumeId(7);

/// Engines that only change the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fake {
    Works,
    /// It changes the record, and then gives no answer.
    DiesAfterwards,
    /// It does nothing.
    Refuses,
}

impl Fake {
    fn change(
        self,
        files: &Files,
        change: impl FnOnce(&mut RegionSpec),
    ) -> Result<(), RegionError> {
        let refused = Err(RegionError::Refused("no".to_owned()));
        if self == Self::Refuses {
            return refused;
        }
        let mut spec = client::record(files)?;
        change(&mut spec);
        record::write(&beside(files).join("record.json"), &spec).unwrap();
        if self == Self::DiesAfterwards { refused } else { Ok(()) }
    }
}

impl Engines for Fake {
    fn add_lease(&self, files: &Files, lease: LeaseTarget, _: &Path) -> Result<(), RegionError> {
        self.change(files, |spec| spec.leases.push(lease))
    }

    fn add_copy(&self, files: &Files, copy: SecondCopy) -> Result<(), RegionError> {
        self.change(files, |spec| spec.copies.push(copy))
    }

    fn keep_disk_copies(&self, files: &Files, directory: &Path) -> Result<(), RegionError> {
        let copies = DiskCopies::new(directory.join("copy"));
        self.change(files, |spec| spec.disk = Some(copies))
    }

    fn evacuate(&self, files: &Files, lease: LeaseId, _: Option<&Path>) -> Result<(), RegionError> {
        self.change(files, |spec| {
            spec.leases.retain(|target| target.lease != lease);
            spec.copies.retain(|copy| copy.lease.lease != lease && copy.of != lease);
        })
    }
}

fn beside(files: &Files) -> PathBuf {
    files.region().parent().unwrap().join(format!(".{}", files.name()))
}

/// Returns a lease as agents borrow it, or as people name it.
fn lease(number: u128, by_agent: bool) -> LeaseTarget {
    let owner = if by_agent { OwnerId(number) } else { OwnerId(number + 1000) };
    LeaseTarget {
        lease: LeaseId(number),
        lender: "b".parse().unwrap(),
        address: Address::Tcp { host: "10.0.0.2".to_owned(), port: 7071 },
        protocol: Protocol::Nbd { export: "x".to_owned(), secure: true },
        capacity: Bytes::mib(64),
        encryption: None,
        claim: Some(Claim { owner, ..Claim::new("a region".to_owned(), true) }),
    }
}

fn region() -> RegionName {
    "items".parse().unwrap()
}

/// Writes the record of the region `items` with these leases.
fn make(directory: &Path, volume: VolumeId, leases: Vec<LeaseTarget>) {
    let files = Files::new(directory, &region());
    fs::create_dir_all(beside(&files)).unwrap();
    let spec = RegionSpec::new(region(), Bytes::mib(64), Bytes::mib(1));
    let spec = RegionSpec { volume, leases, ..spec };
    record::write(&beside(&files).join("record.json"), &spec).unwrap();
}

fn open(directory: &Path, fake: Fake) -> Regions {
    Regions::open(directory.to_owned(), directory.join("tls"), Box::new(fake)).unwrap()
}

fn live_volume() -> LiveVolume {
    LiveVolume {
        volume: VOLUME,
        bytes: Bytes::mib(64),
        owner: Owner::Region(region()),
        group: aquifer_page::Group::default(),
        cause: Cause::ByHand,
        leases: Vec::new(),
        copies: Vec::new(),
    }
}

#[test]
fn each_region_with_borrowed_leases_keeps_copies_on_the_disk() {
    let directory = tempfile::tempdir().unwrap();
    make(directory.path(), VOLUME, vec![lease(1, true)]);
    let refusing = open(directory.path(), Fake::Refuses);
    assert!(refusing.lacks_disk_copies(|_| true));
    refusing.keep_disk_copies(directory.path(), |_| true);
    assert!(refusing.lacks_disk_copies(|_| true), "it tries again");
    let regions = open(directory.path(), Fake::Works);
    regions.keep_disk_copies(directory.path(), |_| true);
    assert!(!regions.lacks_disk_copies(|_| true));
    assert!(!open(directory.path(), Fake::Works).lacks_disk_copies(|_| true), "its record says so");
}

#[test]
fn the_next_agent_finds_the_leases_that_agents_borrowed() {
    let dir = tempfile::tempdir().unwrap();
    make(dir.path(), VOLUME, vec![lease(1, true), lease(2, false)]);
    let regions = open(dir.path(), Fake::Works);
    let [live] = &regions.live()[..] else { panic!("{:?}", regions.live()) };
    assert_eq!((live.volume, live.bytes), (VOLUME, Bytes::mib(64)));
    assert_eq!(live.leases.iter().map(|held| held.lease).collect::<Vec<_>>(), [LeaseId(1)]);
    assert_eq!(regions.leases_by_lender()[&"b".parse().unwrap()], [LeaseId(1)]);
    make(dir.path(), VOLUME, vec![lease(2, false)]);
    assert!(open(dir.path(), Fake::Works).live().is_empty(), "a person named all its lenders");
}

fn copy() -> SecondCopy {
    SecondCopy { of: LeaseId(1), lease: lease(2, true), lags: false }
}

#[test]
fn a_second_copy_is_held_until_the_region_has_left_it() {
    let dir = tempfile::tempdir().unwrap();
    make(dir.path(), VOLUME, vec![lease(1, true)]);
    let regions = open(dir.path(), Fake::Works);
    regions.add_copy(VOLUME, copy()).unwrap();
    for regions in [&regions, &open(dir.path(), Fake::Works)] {
        let [live] = &regions.live()[..] else { panic!("{:?}", regions.live()) };
        assert_eq!((live.bytes, live.leases.len()), (Bytes::mib(64), 1));
        let copies: Vec<_> = live.copies.iter().map(|(of, copy)| (*of, copy.lease)).collect();
        assert_eq!(copies, [(LeaseId(1), LeaseId(2))]);
        assert_eq!(regions.leases_by_lender()[&"b".parse().unwrap()], [LeaseId(1), LeaseId(2)]);
        assert_eq!(regions.has_left(VOLUME, LeaseId(2)), Some(false));
    }
    let (unused, moved) = regions.evacuate(VOLUME, (LeaseId(2), None), Vec::new());
    assert_eq!((unused, moved), (Vec::new(), Ok(())));
    assert_eq!(regions.has_left(VOLUME, LeaseId(2)), Some(true));
    assert_eq!(regions.has_left(VOLUME, LeaseId(1)), Some(false));
}

#[test]
fn a_second_copy_that_fails_leaves_no_lease_in_the_record() {
    for fake in [Fake::DiesAfterwards, Fake::Refuses] {
        let dir = tempfile::tempdir().unwrap();
        make(dir.path(), VOLUME, vec![lease(1, true)]);
        let regions = open(dir.path(), fake);
        regions.add_copy(VOLUME, copy()).unwrap_err();
        assert_eq!(regions.has_left(VOLUME, LeaseId(2)), Some(true));
    }
}

#[test]
fn a_region_is_gone_with_its_record_or_its_name() {
    let dir = tempfile::tempdir().unwrap();
    make(dir.path(), VOLUME, vec![lease(1, true)]);
    let regions = open(dir.path(), Fake::Works);
    assert_eq!((regions.gone(), regions.has_left(VOLUME, LeaseId(1))), (vec![], Some(false)));
    make(dir.path(), VolumeId(8), vec![lease(3, true)]);
    assert_eq!((regions.gone(), regions.has_left(VOLUME, LeaseId(1))), (vec![VOLUME], None));
    fs::remove_dir_all(dir.path().join(".items")).unwrap();
    assert_eq!(regions.gone(), [VOLUME]);
    regions.keep(|_| true, |_| true);
    assert_eq!(regions.gone(), [VOLUME], "until its leases are on their way back");
    regions.keep(|_| false, |_| true);
    assert!(regions.gone().is_empty() && !regions.has(VOLUME));
}

#[test]
fn a_region_in_its_spill_file_is_known_until_it_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    make(dir.path(), VOLUME, Vec::new());
    let files = Files::new(dir.path(), &region());
    let spill = Some(SpillFile::new(dir.path().join("spill")));
    Fake::Works.change(&files, |spec| spec.spill = spill).unwrap();
    let regions = open(dir.path(), Fake::Works);
    assert_eq!(regions.live().len(), 1);
    regions.keep(|_| false, |_| false);
    assert!(regions.has(VOLUME));
    fs::remove_dir_all(beside(&files)).unwrap();
    regions.keep(|_| false, |_| true);
    assert_eq!(regions.gone(), [VOLUME], "until the controller has heard so");
    regions.keep(|_| false, |_| false);
    assert!(!regions.has(VOLUME));
}

#[test]
fn an_unreadable_record_is_no_sign_that_the_region_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    make(dir.path(), VOLUME, vec![lease(1, true)]);
    let regions = open(dir.path(), Fake::Works);
    fs::write(dir.path().join(".items/record.json"), "{").unwrap();
    assert_eq!((regions.gone(), regions.has_left(VOLUME, LeaseId(1))), (vec![], None));
    assert_eq!(regions.live().len(), 1);
}

#[test]
fn the_record_says_which_leases_a_move_has_changed() {
    for (fake, unused, moved, left) in [
        (Fake::Works, vec![], true, vec![LeaseId(2)]),
        (Fake::DiesAfterwards, vec![], true, vec![LeaseId(2)]),
        (Fake::Refuses, vec![LeaseId(2)], false, vec![LeaseId(1)]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        make(dir.path(), VOLUME, vec![lease(1, true)]);
        let regions = open(dir.path(), fake);
        let onto = vec![(LeaseId(2), Ok(lease(2, true)))];
        let (without, result) = regions.evacuate(VOLUME, (LeaseId(1), None), onto);
        assert_eq!((without, result.is_ok()), (unused, moved), "{fake:?}");
        let has = regions.live().remove(0).leases;
        assert_eq!(has.iter().map(|held| held.lease).collect::<Vec<_>>(), left, "{fake:?}");
    }
}

#[test]
fn a_lease_that_cannot_be_reached_is_not_used() {
    let dir = tempfile::tempdir().unwrap();
    make(dir.path(), VOLUME, vec![lease(1, true)]);
    let regions = open(dir.path(), Fake::Works);
    let onto = vec![(LeaseId(2), Err("no way".to_owned()))];
    let (unused, moved) = regions.evacuate(VOLUME, (LeaseId(1), None), onto);
    assert_eq!((unused, moved), (vec![LeaseId(2)], Ok(())));
    let onto = vec![(LeaseId(3), Ok(lease(3, true)))];
    let (unused, moved) = regions.evacuate(VolumeId(9), (LeaseId(1), None), onto);
    assert_eq!(unused, [LeaseId(3)]);
    assert!(moved.unwrap_err().contains("is gone"));
}

#[test]
fn a_region_takes_its_leases_when_its_record_has_them() {
    let dir = tempfile::tempdir().unwrap();
    let regions = open(dir.path(), Fake::Works);
    regions.expect(&region(), VOLUME);
    make(dir.path(), VOLUME, vec![lease(1, true)]);
    assert_eq!(regions.settle(&region(), VOLUME, true), Ok(true));
    assert_eq!(regions.settle(&region(), VOLUME, true), Ok(true), "a copy of the word");
    assert_eq!(regions.wait_for(&live_volume(), Duration::from_secs(600)), Ok(()));
    assert_eq!(regions.settle(&region(), VOLUME, true), Ok(true), "a late copy");
    assert!(regions.has(VOLUME));
}

#[test]
fn a_region_whose_maker_died_takes_its_leases_in_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let regions = open(dir.path(), Fake::Works);
    regions.expect(&region(), VOLUME);
    make(dir.path(), VOLUME, vec![lease(1, true)]);
    assert_eq!(regions.wait_for(&live_volume(), Duration::ZERO), Ok(()));
    assert!(regions.has(VOLUME));
}

#[test]
fn a_region_that_does_not_exist_in_time_gets_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let regions = open(dir.path(), Fake::Works);
    regions.expect(&region(), VOLUME);
    let late = regions.wait_for(&live_volume(), Duration::ZERO).unwrap_err();
    assert!(late.contains("has no record of it"), "{late}");
    make(dir.path(), VOLUME, vec![lease(1, true)]);
    assert_eq!(regions.settle(&region(), VOLUME, true), Ok(false), "its leases are on their way");
}

#[test]
fn a_region_that_its_maker_could_not_remove_keeps_its_leases() {
    let dir = tempfile::tempdir().unwrap();
    let regions = open(dir.path(), Fake::Works);
    regions.expect(&region(), VOLUME);
    make(dir.path(), VOLUME, vec![lease(1, true)]);
    assert_eq!(regions.settle(&region(), VOLUME, false), Ok(true));
    assert_eq!(regions.wait_for(&live_volume(), Duration::from_secs(600)), Ok(()));
    assert!(regions.has(VOLUME));
}
