//! A region is handed over with the leases that it has at that moment.

use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use aquifer_region::handover::{Frame, Round, Sent};
use aquifer_region::process::{Files, RegionSpec, client};
use aquifer_region_client::Region;
use aquifer_volume::LeaseState;

use super::{Served, cannot_run, lenders, program};
use crate::common::pool::wait_until;

/// The other host of a hand-over, and the connections to both engines.
struct HandOver {
    to: Served,
    source: UnixStream,
    destination: UnixStream,
}

impl HandOver {
    /// Begins to hand a region over, of which `offered` was told earlier.
    fn begin(from: &Served, offered: &RegionSpec) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let regions = directory.path().join("regions");
        client::create_foreign(&program(), &regions, offered).unwrap();
        let files = Files::new(&regions, &offered.name);
        let destination = client::receive(&files).unwrap();
        let source = client::send(&from.files).unwrap();
        let to = Served { files, region: None, _directory: directory };
        Self { to, source, destination }
    }

    /// Does a round, and returns once the destination has all of it.
    fn round(&mut self, round: Round) -> Result<Sent, String> {
        Frame::Round(round).send(&mut self.source, &[]).unwrap();
        let mut data = Vec::new();
        let sent = loop {
            match Frame::receive(&mut self.source, &mut data).unwrap().unwrap() {
                Frame::Sent(sent) => break sent,
                Frame::Failed(why) => return Err(why),
                frame => frame.send(&mut self.destination, &data).unwrap(),
            }
        };
        Frame::Sync.send(&mut self.destination, &[]).unwrap();
        match Frame::receive(&mut self.destination, &mut data).unwrap().unwrap() {
            Frame::Done => Ok(sent),
            other => Err(format!("{other:?}")),
        }
    }

    /// Makes the region the destination's.
    fn give_away(mut self) -> Served {
        Frame::GiveAway.send(&mut self.source, &[]).unwrap();
        let answer = Frame::receive(&mut self.source, &mut Vec::new()).unwrap();
        assert_eq!(answer, Some(Frame::Done));
        client::own(&self.to.files).unwrap();
        self.to.region = Some(Region::map(&self.to.files.region()).unwrap());
        self.to
    }
}

#[test]
fn leases_that_changed_since_the_offer_arrive_with_the_region() {
    if cannot_run() {
        return;
    }
    let [one, two, three] = lenders();
    let mut from = Served::new(&[one.lease(1), two.lease(2)]);
    from.write_all(1);
    let offered = client::record(&from.files).unwrap();
    let mut moving = HandOver::begin(&from, &offered);
    moving.round(Round::Copy).unwrap();
    from.add(three.lease(3)).unwrap();
    from.evacuate(1).unwrap();
    from.write_all(2);
    moving.round(Round::Last).unwrap();
    // Nothing changes while the region is between the hosts.
    for refused in [from.evacuate(2), from.add(one.lease(1)), moving.to.evacuate(2)] {
        let refused = refused.unwrap_err();
        assert!(refused.contains("handed over"), "{refused}");
    }
    assert_eq!(moving.to.leases(), [2, 3]);
    moving.round(Round::Rest).unwrap();
    drop(from.region.take());
    let to = moving.give_away();
    to.check_all(2);
    to.kill_engine();
    to.check_all(2);
    let spec = client::record(&to.files).unwrap();
    let generations = spec.leases.iter().map(|lease| lease.claim.as_ref().unwrap().generation);
    assert_eq!(generations.collect::<Vec<_>>(), [1, 1]);
    to.add(one.lease(1)).unwrap();
    to.evacuate(2).unwrap();
    to.check_all(2);
    to.write_all(3);
    to.check_all(3);
}

#[test]
fn an_evacuation_under_way_stops_for_a_hand_over() {
    if cannot_run() {
        return;
    }
    let [one, two] = lenders();
    let from = Served::with(|spec| {
        spec.leases = vec![one.lease(1)];
        spec.io_timeout = Duration::from_secs(120);
    });
    from.write_all(1);
    let offered = client::record(&from.files).unwrap();
    from.add(two.lease(2)).unwrap();
    let mut moving = HandOver::begin(&from, &offered);
    // The first extent cannot arrive while its destination stands still.
    two.freeze();
    thread::scope(|scope| {
        let evacuated = scope.spawn(|| from.evacuate(1));
        wait_until("the evacuation has begun", || {
            let state = &from.status().volume.leases[0].state;
            matches!(state, LeaseState::Evacuating { total: 1.., .. })
        });
        let round = scope.spawn(|| moving.round(Round::Last));
        let is_frozen = || from.evacuate(77).is_err_and(|why| why.contains("handed over"));
        wait_until("the region is frozen", is_frozen);
        two.thaw();
        let refused = evacuated.join().unwrap().unwrap_err();
        assert!(refused.contains("handed over"), "{refused}");
        round.join().unwrap().unwrap();
    });
    assert_eq!((from.leases(), moving.to.leases()), (vec![1, 2], vec![1, 2]));
    // The hand-over ends with its connection, and the region stays.
    drop(moving);
    wait_until("the lease is evacuated", || from.evacuate(1).is_ok());
    from.check_all(1);
    assert_eq!(from.leases(), [2]);
}
