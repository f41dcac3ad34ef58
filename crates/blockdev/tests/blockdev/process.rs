//! Tests of the volume process: start, requests, detach and crash.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aquifer_blockdev::process::{Files, ProcessError, VolumeRecord, VolumeSpec, client};
use aquifer_blockdev::{BackendKind, backend, swap};
use aquifer_page::{Bytes, EXTENT_SIZE, LeaseId, PAGE_SIZE, VolumeId};
use aquifer_volume::{
    Encryption, EncryptionKey, EncryptionMode, LeaseStatus, LeaseTarget, Protocol,
};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use tempfile::TempDir;

use crate::common::Random;
use crate::common::aligned::Aligned;
use crate::common::example::example;
use crate::common::lender::OurLender;

const EXTENTS: u64 = 2;

/// A state directory with one volume. Dropping it ends the volume's process and cleans up.
struct Volume {
    state: TempDir,
    spec: VolumeSpec,
}

impl Volume {
    fn new(leases: Vec<LeaseTarget>) -> Self {
        let state = tempfile::tempdir().unwrap();
        let spec = VolumeSpec {
            volume: VolumeId::random(),
            capacity: Bytes(EXTENTS * EXTENT_SIZE),
            leases,
            backend: BackendKind::Auto,
            workers: 2,
            swap: false,
            priority: None,
            io_timeout: Duration::from_secs(5),
            identity: None,
            spill: None,
            state: state.path().to_owned(),
            note: "a note".into(),
        };
        Self { state, spec }
    }

    fn state(&self) -> &Path {
        self.state.path()
    }

    fn id(&self) -> VolumeId {
        self.spec.volume
    }

    fn files(&self) -> Files {
        Files::new(self.state(), self.id())
    }

    fn spawn(&self) -> VolumeRecord {
        client::spawn(&volume_process(), &self.spec).unwrap()
    }

    fn detach(&self) -> Result<(), ProcessError> {
        client::detach(self.state(), self.id(), |_| ())
    }

    /// Asserts that process, device, swap and files are gone.
    fn assert_gone(&self, record: &VolumeRecord) {
        crate::common::wait_until("the end of the process", || !is_running(record.pid));
        // Another test may have a device of this name by then, with swap. Swap on this volume would
        // keep its device, and so the mark.
        let is_up = backend::is_marked(&record.device, &record.spec.label());
        assert!(!is_up, "{} is still there", record.device.display());
        assert_eq!(client::list(self.state()).unwrap(), []);
        assert!(!client::is_alive(self.state(), self.id()));
        assert!(!self.files().socket().exists() && !self.files().record().exists());
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        let Ok(record) = client::record(self.state(), self.id()) else { return };
        if self.detach().is_err() && is_running(record.pid) {
            let _ = kill_process(pid(record.pid), Signal::KILL);
            crate::common::wait_until("the end of the process", || !is_running(record.pid));
        }
        let _ = client::clean_up(self.state(), self.id());
    }
}

/// Returns the program that volume processes run.
fn volume_process() -> PathBuf {
    example("aquifer-blockdev", "volume_process")
}

fn pid(pid: u32) -> Pid {
    Pid::from_raw(pid.cast_signed()).unwrap()
}

fn is_running(process: u32) -> bool {
    test_kill_process(pid(process)).is_ok()
}

fn lease(lender: &OurLender, number: u128) -> LeaseTarget {
    let key = EncryptionKey::try_from(format!("{number:064x}")).unwrap();
    LeaseTarget {
        lease: LeaseId(number),
        lender: format!("lender-{number}").parse().unwrap(),
        address: lender.address(),
        protocol: Protocol::Nbd { export: String::new(), secure: false },
        capacity: Bytes(EXTENTS * EXTENT_SIZE),
        encryption: Some(Encryption { key, mode: EncryptionMode::Random }),
        claim: None,
    }
}

fn open_direct(device: &Path) -> File {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(device).unwrap()
}

/// Returns known content for some pages of each extent, with its offsets.
fn pages() -> impl Iterator<Item = (u64, Aligned)> {
    (0..EXTENTS * 64).map(|number| {
        let mut page = Aligned::new(PAGE_SIZE);
        Random(number).fill(&mut page);
        (number * (EXTENT_SIZE / 64), page)
    })
}

fn write_content(device: &Path) {
    let file = open_direct(device);
    pages().for_each(|(offset, page)| file.write_all_at(&page, offset).unwrap());
}

fn check_content(device: &Path) {
    let file = open_direct(device);
    let mut found = Aligned::new(PAGE_SIZE);
    for (offset, page) in pages() {
        file.read_exact_at(&mut found, offset).unwrap();
        assert!(*found == *page, "the page at {offset}");
    }
}

#[test]
fn a_process_of_its_own_serves_a_volume_until_the_detach() {
    let lender = OurLender::start(EXTENTS);
    let volume = Volume::new(vec![lease(&lender, 1)]);
    let record = volume.spawn();
    assert_eq!(record, client::record(volume.state(), volume.id()).unwrap());
    assert_eq!(record.spec, volume.spec);
    assert_eq!(client::list(volume.state()).unwrap(), [volume.id()]);
    assert!(client::is_alive(volume.state(), volume.id()));
    let stat = fs::read_to_string(format!("/proc/{}/stat", record.pid)).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_ascii_whitespace().collect();
    assert_eq!(fields[3], record.pid.to_string(), "it leads a session of its own");
    assert_ne!(fields[1], std::process::id().to_string(), "it is no child of its starter");

    write_content(&record.device);
    check_content(&record.device);
    let status = client::status(volume.state(), volume.id()).unwrap();
    assert_eq!(status.record, record);
    assert_eq!(status.volume.placed_extents, EXTENTS);
    assert!(!status.safety.0.is_empty());

    volume.detach().unwrap();
    volume.assert_gone(&record);
    assert!(matches!(volume.detach(), Err(ProcessError::NotServed(id)) if id == volume.id()));
}

#[test]
fn a_volume_goes_again_when_its_starter_ends_before_it_keeps_it() {
    let lender = OurLender::start(EXTENTS);
    let mut volume = Volume::new(vec![lease(&lender, 1)]);
    (volume.spec.swap, volume.spec.priority) = (true, Some(0));
    let started = client::start(&volume_process(), &volume.spec).unwrap();
    let record = started.record().clone();
    assert!(swap::usage(&record.device).unwrap().is_some());
    drop(started);
    volume.assert_gone(&record);
}

#[test]
fn a_lease_may_be_moved_out_by_several_at_once_and_again() {
    let (first, second) = (OurLender::start(EXTENTS), OurLender::start(EXTENTS));
    let volume = Volume::new(vec![lease(&first, 1)]);
    let record = volume.spawn();
    write_content(&record.device);
    client::add_lease(volume.state(), volume.id(), lease(&second, 2)).unwrap();
    let evacuate = || client::evacuate(volume.state(), volume.id(), (LeaseId(1), true), |_| ());
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..3).map(|_| scope.spawn(evacuate)).collect();
        all.into_iter().for_each(|one| one.join().unwrap().unwrap());
    });
    // A client may repeat the request if it lost the answer.
    evacuate().unwrap();
    assert_eq!(
        client::record(volume.state(), volume.id()).unwrap().spec.leases,
        [lease(&second, 2)]
    );
    drop(first);
    check_content(&record.device);
    volume.detach().unwrap();
}

#[test]
fn swap_is_found_and_turned_off_without_a_readable_record() {
    for damage in ["", "{\"spec\":{\"vol"] {
        let lender = OurLender::start(EXTENTS);
        let mut volume = Volume::new(vec![lease(&lender, 1)]);
        (volume.spec.swap, volume.spec.priority) = (true, Some(0));
        let record = volume.spawn();
        kill_process(pid(record.pid), Signal::KILL).unwrap();
        crate::common::wait_until("the death of the process", || {
            !client::is_alive(volume.state(), volume.id())
        });
        fs::write(volume.files().record(), damage).unwrap();
        client::clean_up(volume.state(), volume.id()).unwrap();
        volume.assert_gone(&record);
    }
}

#[test]
fn records_are_replaced_whole_and_no_live_process_seems_dead() {
    let (first, second) = (OurLender::start(EXTENTS), OurLender::start(EXTENTS));
    let volume = Volume::new(vec![lease(&first, 1)]);
    let record = volume.spawn();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let looks = scope.spawn(|| {
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                assert!(client::is_alive(volume.state(), volume.id()));
                client::record(volume.state(), volume.id()).unwrap();
            }
        });
        for round in 0..10 {
            let (from, to) = if round % 2 == 0 { (1, &second) } else { (2, &first) };
            client::add_lease(volume.state(), volume.id(), lease(to, 3 - from)).unwrap();
            client::evacuate(volume.state(), volume.id(), (LeaseId(from), true), |_| ()).unwrap();
        }
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        looks.join().unwrap();
    });
    volume.detach().unwrap();
    volume.assert_gone(&record);
    assert!(!volume.files().log().exists(), "an orderly end leaves no log");
}

#[test]
fn logs_of_past_volumes_are_bounded() {
    let lender = OurLender::start(EXTENTS);
    let volume = Volume::new(vec![lease(&lender, 1)]);
    let directory = volume.files().log().parent().unwrap().to_owned();
    fs::create_dir_all(&directory).unwrap();
    (0..30).for_each(|_| {
        fs::write(Files::new(volume.state(), VolumeId::random()).log(), "it died").unwrap()
    });
    volume.spawn();
    let logs = fs::read_dir(&directory).unwrap().filter(|entry| {
        entry.as_ref().unwrap().path().extension().is_some_and(|kind| kind == "log")
    });
    assert!(logs.count() <= 9);
    assert!(volume.files().log().exists());
    volume.detach().unwrap();
}

#[test]
fn a_silent_lender_does_not_keep_the_pages_of_others() {
    let (silent, other) = (OurLender::start(EXTENTS), OurLender::start(EXTENTS));
    let mut volume = Volume::new(vec![lease(&silent, 1), lease(&other, 2)]);
    volume.spec.io_timeout = Duration::from_secs(120);
    // ublk has no spare threads, so a silent lender can block all of them. A test in the nbd
    // backend covers nbd.
    volume.spec.backend = BackendKind::FuseLoop;
    let record = volume.spawn();
    write_content(&record.device);
    let placed = client::status(volume.state(), volume.id()).unwrap().volume.leases;
    assert!(placed.iter().all(|lease| lease.used_extents == 1), "{placed:?}");
    let waiting = 10;
    let unanswered = std::sync::atomic::AtomicUsize::new(waiting);
    let in_flight = || {
        let name = record.device.file_name().unwrap().to_str().unwrap();
        let text = fs::read_to_string(format!("/sys/block/{name}/inflight")).unwrap();
        text.split_whitespace().next().unwrap().parse::<usize>().unwrap()
    };
    silent.freeze();
    std::thread::scope(|scope| {
        for reader in 0..waiting {
            let (device, unanswered) = (&record.device, &unanswered);
            scope.spawn(move || {
                let (offset, page) = pages().nth(reader * 3).unwrap();
                let mut found = Aligned::new(PAGE_SIZE);
                open_direct(device).read_exact_at(&mut found, offset).unwrap();
                unanswered.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                assert!(*found == *page, "the page at {offset}");
            });
        }
        crate::common::wait_until("they wait for the silent lender", || in_flight() == waiting);
        let mut found = Aligned::new(PAGE_SIZE);
        for (offset, page) in pages().skip(64) {
            open_direct(&record.device).read_exact_at(&mut found, offset).unwrap();
            assert!(*found == *page, "the page at {offset}");
        }
        assert_eq!(unanswered.load(std::sync::atomic::Ordering::SeqCst), waiting);
        silent.thaw();
    });
    volume.detach().unwrap();
}

#[test]
fn the_socket_is_for_its_owner_only() {
    let lender = OurLender::start(EXTENTS);
    let volume = Volume::new(vec![lease(&lender, 1)]);
    volume.spawn();
    let socket = volume.files().socket();
    assert_eq!(fs::metadata(&socket).unwrap().mode() & 0o777, 0o600);
    assert_eq!(fs::metadata(socket.parent().unwrap()).unwrap().mode() & 0o777, 0o700);
}

#[test]
fn a_lease_is_replaced_by_another_without_a_byte_lost() {
    let (first, second) = (OurLender::start(EXTENTS), OurLender::start(EXTENTS));
    let volume = Volume::new(vec![lease(&first, 1)]);
    let record = volume.spawn();
    write_content(&record.device);

    client::add_lease(volume.state(), volume.id(), lease(&second, 2)).unwrap();
    let mut last = None;
    client::evacuate(volume.state(), volume.id(), (LeaseId(1), true), |now| last = Some(now))
        .unwrap();
    assert_eq!(last.map(|now| now.moved), Some(EXTENTS));
    drop(first);
    check_content(&record.device);
    let noted = client::record(volume.state(), volume.id()).unwrap().spec.leases;
    assert_eq!(noted, [lease(&second, 2)]);
    volume.detach().unwrap();
}

/// Waits until the only lease of the volume has a whole second copy.
fn copies_are_whole(volume: &Volume) {
    crate::common::wait_until("both copies are whole", || {
        let leases = client::status(volume.state(), volume.id()).unwrap().volume.leases;
        let [LeaseStatus { copy: Some(copy), .. }] = &leases[..] else { return false };
        copy.answer == (true, true) && copy.lacks.saturating_add(copy.first_lacks) == Bytes::ZERO
    });
}

#[test]
fn each_of_two_copies_may_lose_its_lender_without_a_byte_lost() {
    let (mut first, mut second) = (OurLender::start(EXTENTS), OurLender::start(EXTENTS));
    let volume = Volume::new(vec![lease(&first, 1)]);
    let record = volume.spawn();
    write_content(&record.device);
    let add = || client::add_copy(volume.state(), volume.id(), LeaseId(1), lease(&second, 2));
    add().unwrap();
    add().unwrap();
    copies_are_whole(&volume);
    let noted = client::record(volume.state(), volume.id()).unwrap();
    let leases: Vec<_> = noted.leases().map(|target| target.lease).collect();
    assert_eq!(leases, [LeaseId(1), LeaseId(2)]);

    first.kill();
    check_content(&record.device);
    // Only the second copy gets these.
    write_content(&record.device);
    first.restart();
    copies_are_whole(&volume);
    second.kill();
    check_content(&record.device);
    second.restart();
    copies_are_whole(&volume);
    volume.detach().unwrap();
    for lender in [&first, &second] {
        assert_eq!(lender.ram(), Bytes::ZERO, "its memory must be free again");
    }
}

#[test]
fn a_second_copy_or_the_first_may_leave_and_the_other_stays() {
    let [first, second, third] = [(); 3].map(|()| OurLender::start(EXTENTS));
    let volume = Volume::new(vec![lease(&first, 1)]);
    let record = volume.spawn();
    write_content(&record.device);
    let add = |copy| client::add_copy(volume.state(), volume.id(), LeaseId(1), copy);
    let leave =
        |lease| client::evacuate(volume.state(), volume.id(), (LeaseId(lease), false), |_| ());
    add(lease(&second, 2)).unwrap();
    copies_are_whole(&volume);
    leave(2).unwrap();
    assert_eq!(client::record(volume.state(), volume.id()).unwrap().copies, Some(Vec::new()));
    check_content(&record.device);

    add(lease(&second, 3)).unwrap();
    copies_are_whole(&volume);
    drop(first);
    let no_room = leave(1).unwrap_err();
    assert!(no_room.to_string().contains("no lease has room"), "{no_room}");
    client::add_lease(volume.state(), volume.id(), lease(&third, 4)).unwrap();
    leave(1).unwrap();
    let noted = client::record(volume.state(), volume.id()).unwrap();
    assert_eq!((noted.spec.leases, noted.copies), (vec![lease(&third, 4)], Some(Vec::new())));
    drop(second);
    check_content(&record.device);
    volume.detach().unwrap();
}

#[test]
fn swap_is_turned_on_at_start_and_off_before_the_device_goes() {
    let lender = OurLender::start(EXTENTS);
    let mut volume = Volume::new(vec![lease(&lender, 1)]);
    (volume.spec.swap, volume.spec.priority) = (true, Some(0));
    let record = volume.spawn();
    let swaps = swap::swaps().unwrap();
    let ours = swaps.iter().find(|swap| swap.path == record.device).unwrap();
    assert_eq!((ours.priority, ours.size), (0, Bytes(EXTENTS * EXTENT_SIZE - PAGE_SIZE as u64)));
    volume.detach().unwrap();
    volume.assert_gone(&record);
}

#[test]
fn a_detach_that_is_refused_leaves_the_volume_served() {
    let lender = OurLender::start(EXTENTS);
    let volume = Volume::new(vec![lease(&lender, 1)]);
    let record = volume.spawn();
    let holder =
        OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(&record.device).unwrap();
    let refused = volume.detach().unwrap_err().to_string();
    assert!(refused.contains(record.device.to_str().unwrap()), "{refused}");
    write_content(&record.device);
    check_content(&record.device);
    drop(holder);
    volume.detach().unwrap();
    volume.assert_gone(&record);
}

#[test]
fn sigterm_detaches_in_order() {
    let lender = OurLender::start(EXTENTS);
    let mut volume = Volume::new(vec![lease(&lender, 1)]);
    (volume.spec.swap, volume.spec.priority) = (true, Some(0));
    let record = volume.spawn();
    kill_process(pid(record.pid), Signal::HUP).unwrap();
    client::status(volume.state(), volume.id()).unwrap();
    kill_process(pid(record.pid), Signal::TERM).unwrap();
    volume.assert_gone(&record);
}

#[test]
fn leftovers_of_a_killed_process_are_cleaned_up() {
    let lender = OurLender::start(EXTENTS);
    let mut volume = Volume::new(vec![lease(&lender, 1)]);
    (volume.spec.swap, volume.spec.priority) = (true, Some(0));
    let record = volume.spawn();
    assert!(matches!(client::clean_up(volume.state(), volume.id()), Err(ProcessError::Served(_))));
    kill_process(pid(record.pid), Signal::KILL).unwrap();
    crate::common::wait_until("the death of the process", || {
        !client::is_alive(volume.state(), volume.id())
    });
    assert_eq!(client::list(volume.state()).unwrap(), [volume.id()]);
    // The kernel closes the files of a dead process one by one: its lock first, its socket later.
    crate::common::wait_until("the end of its socket", || {
        let status = client::status(volume.state(), volume.id());
        matches!(status, Err(ProcessError::NotServed(_)))
    });
    client::clean_up(volume.state(), volume.id()).unwrap();
    volume.assert_gone(&record);
    client::clean_up(volume.state(), volume.id()).unwrap();
}

#[test]
fn a_volume_is_served_once() {
    let lender = OurLender::start(EXTENTS);
    let volume = Volume::new(vec![lease(&lender, 1)]);
    let record = volume.spawn();
    let refused = client::spawn(&volume_process(), &volume.spec).unwrap_err().to_string();
    assert!(refused.contains(&volume.id().to_string()) && refused.contains("already"), "{refused}");
    assert_eq!(
        client::record(volume.state(), volume.id()).unwrap(),
        record,
        "the record is still the first one's"
    );
    volume.detach().unwrap();
}

#[test]
fn a_volume_that_cannot_be_made_says_why_and_leaves_nothing() {
    let mut lender = OurLender::start(EXTENTS);
    lender.kill();
    let volume = Volume::new(vec![lease(&lender, 7)]);
    let refused = client::spawn(&volume_process(), &volume.spec).unwrap_err().to_string();
    assert!(refused.contains("lender-7") && refused.contains(&LeaseId(7).to_string()), "{refused}");
    assert_eq!(client::list(volume.state()).unwrap(), []);
}

#[test]
fn a_volume_that_cannot_be_swapped_to_leaves_nothing() {
    let lender = OurLender::start(EXTENTS);
    let mut volume = Volume::new(vec![lease(&lender, 1)]);
    (volume.spec.swap, volume.spec.priority) = (true, Some(40_000));
    let refused = client::spawn(&volume_process(), &volume.spec).unwrap_err().to_string();
    assert!(refused.contains("40000") && refused.contains("32767"), "{refused}");
    crate::common::wait_until("the end of the process", || {
        !client::is_alive(volume.state(), volume.id())
    });
    assert_eq!(client::list(volume.state()).unwrap(), []);
    assert!(!volume.files().socket().exists());
}

#[test]
fn garbage_on_the_control_socket_is_an_error_and_others_go_on() {
    let lender = OurLender::start(EXTENTS);
    let volume = Volume::new(vec![lease(&lender, 1)]);
    volume.spawn();
    let silent = UnixStream::connect(volume.files().socket()).unwrap();
    let mut garbage = UnixStream::connect(volume.files().socket()).unwrap();
    garbage.write_all(b"{\"request\":\"fly\"}\n").unwrap();
    let answer = std::io::read_to_string(garbage).unwrap();
    assert!(answer.contains("cannot understand"), "{answer}");
    client::status(volume.state(), volume.id()).unwrap();
    drop(silent);
    volume.detach().unwrap();
}
