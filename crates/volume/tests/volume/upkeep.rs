//! The upkeep of a volume, and the events that it reports.

use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use aquifer_page::{Bytes, EXTENT_SIZE, WorkerId};
use aquifer_volume::{Happening, Upkeep, Volume, VolumeConfig};

use crate::common::*;

/// A volume under upkeep, and the events that the upkeep reported.
struct Kept {
    volume: Arc<Volume>,
    told: Arc<Mutex<Vec<Happening>>>,
    _upkeep: Upkeep,
}

impl Kept {
    fn new(config: VolumeConfig) -> Self {
        let volume = Arc::new(Volume::new(config).unwrap());
        let told = Arc::new(Mutex::new(Vec::new()));
        let tell = told.clone();
        let upkeep =
            Upkeep::start(&volume, move |event| tell.lock().unwrap().push(event.what.clone()))
                .unwrap();
        Self { volume, told, _upkeep: upkeep }
    }

    fn told(&self, is_it: impl Fn(&Happening) -> bool) -> usize {
        self.told.lock().unwrap().iter().filter(|what| is_it(what)).count()
    }
}

#[test]
fn spilled_extents_go_back_to_lenders_when_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    let kept = Kept::new(VolumeConfig { spill: Some(dir.path().to_owned()), ..config(2) });
    let volume = &kept.volume;
    let pages = |extent: u64| (0..64).map(move |page| extent * EXTENT_SIZE + page * 200 * PAGE);
    pages(0).chain(pages(1)).for_each(|at| write(volume, at, 1));
    let spill = volume.status().spill.unwrap();
    assert_eq!((spill.used_extents, spill.held), (2, Bytes(128 * PAGE)));
    wait_until("it is told", || kept.told(|what| *what == Happening::SpillStarted) == 1);

    let lender = lender(2);
    volume.add_lease(lease(&lender, 1, 2)).unwrap();
    let mut round = 1;
    wait_until("all are with the lender", || {
        // The test uses the extents meanwhile.
        round += 1;
        pages(0).step_by(7).for_each(|at| {
            expect(volume, at, round - 1);
            write(volume, at, round);
        });
        pages(0)
            .filter(|at| !(at / 200 / PAGE).is_multiple_of(7))
            .for_each(|at| expect(volume, at, 1));
        volume.status().spill.unwrap().used_extents == 0
    });
    assert_eq!(placed(volume), [2]);
    wait_until("it is told", || kept.told(|what| *what == Happening::SpillEnded) == 1);
    pages(0).step_by(7).for_each(|at| expect(volume, at, round));
    pages(1).for_each(|at| expect(volume, at, 1));
}

#[test]
fn a_lender_lost_and_back_is_told_without_anybody_asking() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pages");
    File::create(&path).unwrap().set_len(EXTENT_SIZE).unwrap();
    let mut lender = Nbdkit::start(&["file", path.to_str().unwrap()]);
    let kept = Kept::new(VolumeConfig { io_timeout: Duration::from_secs(1), ..config(1) });
    let volume = &kept.volume;
    volume.add_lease(lease(&lender, 1, 1)).unwrap();
    write(volume, 3 * PAGE, 1);
    lender.kill();
    for _ in 0..3 {
        volume.read(WorkerId(0), 3 * PAGE, &mut [0; 16]).unwrap_err();
    }
    let is_loss = |what: &Happening| {
        matches!(what, Happening::LenderLost { lender, .. }
            if lender.to_string() == "lender-1")
    };
    let is_page = |what: &Happening| matches!(what, Happening::PageLost { page: 3, .. });
    wait_until("both are told, once", || kept.told(is_loss) == 1 && kept.told(is_page) == 1);
    let status = volume.status();
    assert!(
        status.failed_reads == 3
            && status.last_error.is_some()
            && status.last_error_at_ms.is_some()
    );
    lender.restart();
    wait_until("it is told", || {
        kept.told(|what| matches!(what, Happening::LenderBack { .. })) == 1
    });
    let status = volume.status();
    assert_eq!(
        (status.last_error, status.last_error_at_ms),
        (None, None),
        "the error is of the past"
    );
    assert_eq!(status.events.len(), 3);
    expect(volume, 3 * PAGE, 1);
}

#[test]
fn lenders_are_left_alone_while_the_volume_is_another_hosts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pages");
    File::create(&path).unwrap().set_len(EXTENT_SIZE).unwrap();
    let mut lender = Nbdkit::start(&["file", path.to_str().unwrap()]);
    let volume =
        Volume::new(VolumeConfig { io_timeout: Duration::from_secs(1), ..config(1) }).unwrap();
    let volume = Arc::new(volume);
    volume.add_lease(lease(&lender, 1, 1)).unwrap();
    write(&volume, 0, 1);
    let (is_ours, looks) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let (ours, look) = (is_ours.clone(), looks.clone());
    let may_act = move || {
        look.fetch_add(1, Ordering::SeqCst);
        ours.load(Ordering::SeqCst)
    };
    let _upkeep = Upkeep::start_while(&volume, may_act, |_| ()).unwrap();
    lender.kill();
    volume.read(WorkerId(0), 0, &mut [0; 16]).unwrap_err();
    lender.restart();
    let back = |what: &Happening| matches!(what, Happening::LenderBack { .. });
    let is_back = || volume.events_after(0).iter().any(|event| back(&event.what));
    let before = looks.load(Ordering::SeqCst);
    wait_until("the upkeep has looked twice", || looks.load(Ordering::SeqCst) > before + 2);
    assert!(!is_back());
    is_ours.store(true, Ordering::SeqCst);
    wait_until("the lender is seen to be back", is_back);
}

#[test]
fn a_lender_whose_connections_do_not_agree_gets_one() {
    let arguments = [
        "--filter=limit",
        "--filter=multi-conn",
        "memory",
        "64M",
        "multi-conn-mode=disable",
        "limit=1",
    ];
    let lender = Nbdkit::start(&arguments);
    let volume = Volume::new(config(1)).unwrap();
    volume.add_lease(lease(&lender, 1, 1)).unwrap();
    thread::scope(|scope| {
        for worker in 0..4 {
            let volume = &volume;
            scope.spawn(move || {
                for page in 0..32 {
                    let at = (worker * 32 + page) * PAGE;
                    volume.write(WorkerId(worker as usize), at, &content(at, 1)).unwrap();
                }
            });
        }
    });
    (0..128).for_each(|page| expect(&volume, page * PAGE, 1));
    assert_eq!(volume.status().errors, 0);
}
