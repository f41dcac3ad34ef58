//! Lenders that come back without their data, and two owners that want one lease.

use aquifer_page::{EXTENT_SIZE, OwnerId, WorkerId};
use aquifer_volume::{Claim, Happening, LeaseState, LeaseTarget, Volume, VolumeError};

use crate::common::*;

const PAGES: u64 = 64;

#[test]
fn a_lender_that_comes_back_empty_is_an_error_and_not_zeroes() {
    for (kind, number) in [(Kind::Nbd, 1), (Kind::Nbd, 2), (Kind::Nvme, 1), (Kind::Nvme, 2)] {
        let mut lender = OurLender::start_kind(kind, 2);
        let volume = Volume::new(config(2)).unwrap();
        volume.add_lease(lender.lease(number)).unwrap();
        (0..PAGES).for_each(|page| write(&volume, page * PAGE, 1));
        lender.kill();
        lender.restart_empty();
        for page in 0..PAGES {
            is_lost(&volume, page, number);
        }
        assert_eq!(volume.status().leases[0].state, LeaseState::Lost, "{kind:?}");
        // Writes fail as well.
        volume.write(WorkerId(0), 0, &content(0, 2)).unwrap_err();
        is_lost(&volume, 0, number);
        takes_nothing_new(&volume);
    }
}

#[test]
fn a_namespace_that_comes_back_empty_under_its_name_is_refused() {
    let mut lender = OurLender::start_named("nqn.2014-08.org.example:always-the-same", 1);
    let volume = Volume::new(config(1)).unwrap();
    volume.add_lease(lender.lease(2)).unwrap();
    write(&volume, 0, 1);
    lender.kill();
    lender.restart_empty();
    is_lost(&volume, 0, 2);
    // Even a write to a new page fails.
    let error = volume.write(WorkerId(0), PAGE, &content(PAGE, 1)).unwrap_err();
    assert!(error.to_string().contains("lost all stored pages"), "{error}");
    assert_eq!(volume.status().leases[0].state, LeaseState::Lost);
}

#[test]
fn a_foreign_lender_that_comes_back_empty_is_an_error() {
    for number in [1, 2] {
        let mut server = lender(2);
        let volume = Volume::new(config(2)).unwrap();
        let encryption = (number == 1).then(aquifer_volume::Encryption::random);
        volume.add_lease(LeaseTarget { encryption, ..lease(&server, number, 2) }).unwrap();
        (0..PAGES).for_each(|page| write(&volume, page * PAGE, 1));
        volume.write(WorkerId(0), PAGES * PAGE, &[0; 4096]).unwrap();
        server.kill();
        server.restart();
        for page in 0..PAGES {
            is_lost(&volume, page, number);
        }
        expect_zeroes(&volume, PAGES * PAGE);
        assert_eq!(volume.status().leases[0].state, LeaseState::Lost);
        write(&volume, 0, 2);
        expect(&volume, 0, 2);
        takes_nothing_new(&volume);
    }
}

#[test]
fn the_next_process_of_a_volume_expects_the_same_pages() {
    let mut lender = OurLender::start(1);
    let first = Volume::new(config(1)).unwrap();
    first.add_lease(lender.lease(2)).unwrap();
    write(&first, 0, 1);
    let found = lender.incarnation();
    drop(first);
    lender.kill();
    lender.restart_empty();
    let claim = Claim { incarnation: Some(found), ..lender.lease(2).claim.unwrap() };
    let target = LeaseTarget { claim: Some(claim), ..lender.lease(2) };
    let second = Volume::new(config(1)).unwrap();
    let error = second.add_lease(target).unwrap_err();
    assert!(error.to_string().contains("lost all stored pages"), "{error}");
}

#[test]
fn a_second_owner_is_refused_by_name_and_the_first_goes_on() {
    for kind in [Kind::Nbd, Kind::Nvme] {
        let lender = OurLender::start_kind(kind, 1);
        let first = Volume::new(config(1)).unwrap();
        first.add_lease(lender.lease(2)).unwrap();
        write(&first, 0, 1);
        let claim = Claim { owner: OwnerId(77), ..Claim::new("somebody else".to_owned(), false) };
        let another = LeaseTarget { claim: Some(claim), ..lender.lease(2) };
        let second = Volume::new(config(1)).unwrap();
        let error = second.add_lease(another.clone()).unwrap_err();
        assert!(matches!(error, VolumeError::Connect { .. }), "{kind:?}: {error}");
        assert!(error.to_string().contains("a test"), "{kind:?}: {error}");
        expect(&first, 0, 1);
        drop(first);
        second.add_lease(another).unwrap();
        write(&second, 0, 2);
        expect(&second, 0, 2);
    }
}

#[track_caller]
fn is_lost(volume: &Volume, page: u64, number: u128) {
    let error = volume.read(WorkerId(0), page * PAGE, &mut [0; 4096]).unwrap_err();
    let text = error.to_string();
    assert!(error.is_lost(), "{text}");
    for part in
        [format!("lender lender-{number}"), format!("lease {number:032x}"), format!("page {page}")]
    {
        assert!(text.contains(&part), "{text}");
    }
}

/// Checks that the volume places no extent on its one lease, which is lost. Checks that one event
/// reports the loss.
#[track_caller]
fn takes_nothing_new(volume: &Volume) {
    let error = volume.write(WorkerId(0), EXTENT_SIZE, &content(0, 1)).unwrap_err();
    assert!(matches!(error, VolumeError::NoRoom(_)), "{error}");
    let status = volume.status();
    assert_eq!((status.leases[0].used_extents, &status.leases[0].state), (1, &LeaseState::Lost));
    let lost = |what: &Happening| matches!(what, Happening::LenderLost { .. });
    let told = status.events.iter().filter(|event| lost(&event.what)).count();
    assert_eq!(told, 1, "{:?}", status.events);
}
