//! Pages for which no lender has room go to a file on this host's disk, and come back.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use aquifer_page::{Bytes, EXTENT_SIZE, LeaseId, PAGE_SIZE};
use aquifer_region::process::{PageState, client};
use aquifer_region_client::Run;
use aquifer_volume::LeaseState;
use tempfile::TempDir;

use super::{CACHE, EXTENTS, SIZE, Served, cannot_run, content, kill, lenders, pages};
use crate::common::pool::{OurLender, wait_until};

/// A directory for spill files, on a disk.
struct Spills(TempDir);

impl Spills {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn directory(&self) -> PathBuf {
        // The engine makes it.
        self.0.path().join("spills")
    }

    fn files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.directory()).into_iter().flatten();
        entries.map(|entry| entry.unwrap().path()).collect()
    }
}

impl Served {
    fn spill(&self, lease: u128, directory: &Path) -> Result<(), String> {
        client::evacuate(&self.files, LeaseId(lease), Some(directory), |_| ())
            .map_err(|error| error.to_string())
    }

    fn spilled(&self) -> Bytes {
        self.status().volume.spill.map_or(Bytes::ZERO, |spill| spill.bytes())
    }
}

/// Returns a region with all of its pages in a file, and the lender that had them.
fn in_a_file(spills: &Spills) -> (OurLender, Served) {
    let [one] = lenders();
    let served = Served::new(&[one.lease(1)]);
    served.write_all(1);
    served.spill(1, &spills.directory()).unwrap();
    (one, served)
}

/// Returns such a region as its pages come back from the file to the lender.
fn coming_back(spills: &Spills) -> (OurLender, Served) {
    let (one, served) = in_a_file(spills);
    served.add(one.lease(1)).unwrap();
    wait_until("pages come back", || served.spilled() < SIZE);
    (one, served)
}

#[test]
fn pages_without_a_lender_survive_in_a_file_and_come_back() {
    if cannot_run() {
        return;
    }
    let ([one, two], spills) = (lenders(), Spills::new());
    let served = Served::new(&[one.lease(1)]);
    served.write_all(1);
    served.evacuate(1).unwrap_err();
    assert!(spills.files().is_empty());
    served.spill(1, &spills.directory()).unwrap();
    assert_eq!((served.leases(), one.ram(), served.spilled()), (vec![], Bytes::ZERO, SIZE));
    served.check_all(1);
    // Pages leave for the file, too, under a key that the file does not hold.
    served.write_all(2);
    served.check_all(2);
    let [file] = &spills.files()[..] else { panic!("{:?}", spills.files()) };
    let on_disk = fs::read(file).unwrap();
    let first = content(0, 2, 0).to_le_bytes();
    assert!(on_disk.iter().any(|byte| *byte != 0));
    assert!(!on_disk.windows(8).any(|bytes| bytes == first), "the file is encrypted");
    // The next engine finds them, and the next supervisor.
    served.kill_engine();
    served.check_all(2);
    served.write_all(3);
    served.kill_all();
    served.check_all(3);

    served.add(two.lease(2)).unwrap();
    assert_eq!(served.spilled(), SIZE);
    client::resize_cache(&served.files, Bytes::mib(2), client::By::Operator).unwrap();
    wait_until("the file is empty", || served.spilled() == Bytes::ZERO);
    served.check_all(3);
    served.kill_engine();
    served.check_all(3);
    assert_eq!(served.leases(), [2]);
    assert!(file.exists(), "the region keeps its file");
    let file = file.clone();
    drop(served);
    assert!(!file.exists(), "the file goes with the region");
}

#[test]
fn killed_engines_lose_nothing_on_the_way_to_the_file_and_back() {
    if cannot_run() {
        return;
    }
    let ([one], spills) = (lenders(), Spills::new());
    let served = Served::new(&[one.lease(1)]);
    for version in 1..=3 {
        served.write_all(version);
        let mut killed = 0;
        let moved = client::evacuate(&served.files, LeaseId(1), Some(&spills.directory()), |_| {
            // An engine that was just killed, or just started, may not answer.
            if killed < 2
                && let Ok(status) = client::status(&served.files)
            {
                killed += 1;
                kill(status.pid);
            }
        });
        let spill = || served.spill(1, &spills.directory());
        wait_until("the pages are in the file", || moved.is_ok() || spill().is_ok());
        assert!(killed > 0);
        served.check_all(version);
        assert_eq!((served.leases(), one.ram()), (vec![], Bytes::ZERO));
        assert_eq!(spills.files().len(), 1);

        served.add(one.lease(1)).unwrap();
        wait_until("pages come back", || {
            served.spilled() < SIZE && client::status(&served.files).is_ok()
        });
        served.kill_engine();
        wait_until("the file is empty", || served.spilled() == Bytes::ZERO);
        served.check_all(version);
    }
}

#[test]
fn a_lease_is_preferred_to_the_file() {
    if cannot_run() {
        return;
    }
    let ([one, two], spills) = (lenders(), Spills::new());
    let served = Served::new(&[one.lease(1)]);
    served.write_all(1);
    served.add(two.lease(2)).unwrap();
    served.spill(1, &spills.directory()).unwrap();
    assert!(spills.files().is_empty(), "the other lender has room");
    assert_eq!((served.leases(), served.spilled()), (vec![2], Bytes::ZERO));
    // Pages come home before they go to the file.
    client::resize_cache(&served.files, SIZE, client::By::Operator).unwrap();
    served.spill(2, &spills.directory()).unwrap();
    assert!(spills.files().is_empty());
    assert_eq!((served.leases(), two.ram()), (vec![], Bytes::ZERO));
    served.check_all(1);
}

#[test]
fn a_file_that_cannot_be_made_or_written_costs_nothing() {
    if cannot_run() {
        return;
    }
    let ([one], place) = (lenders(), tempfile::tempdir().unwrap());
    let served = Served::new(&[one.lease(1)]);
    served.write_all(1);
    let occupied = place.path().join("occupied");
    fs::write(&occupied, b"").unwrap();
    let refused = served.spill(1, &occupied).unwrap_err();
    assert!(refused.contains(&occupied.display().to_string()), "{refused}");
    served.check_all(1);

    // A file system with less room than an extent needs.
    let small = place.path().join("small");
    fs::create_dir(&small).unwrap();
    let mount = Mount::new(&small, "size=1m");
    let refused = served.spill(1, &small).unwrap_err();
    assert!(refused.contains("are free there"), "{refused}");
    assert_eq!(served.leases(), [1]);
    served.check_all(1);
    served.kill_engine();
    served.write_all(2);
    served.check_all(2);
    drop(served);
    drop(mount);
}

#[test]
fn pages_spill_while_a_lender_with_room_is_away() {
    if cannot_run() {
        return;
    }
    let ([one, mut two], spills) = (lenders(), Spills::new());
    let served = Served::new(&[one.lease(1)]);
    served.write_all(1);
    served.add(two.lease(2)).unwrap();
    two.kill();
    served.evacuate(1).unwrap_err();
    wait_until("the pages are in the file", || served.spill(1, &spills.directory()).is_ok());
    assert_eq!((served.leases(), one.ram()), (vec![2], Bytes::ZERO));
    served.check_all(1);
    two.restart();
    wait_until("the file is empty", || served.spilled() == Bytes::ZERO);
    served.check_all(1);
}

#[test]
fn a_lender_that_dies_or_hangs_as_pages_come_back_costs_nothing() {
    if cannot_run() {
        return;
    }
    let spills = Spills::new();
    let (mut one, served) = coming_back(&spills);
    one.kill();
    served.kill_engine();
    one.restart();
    // Its answers come after the engine's timeout.
    one.freeze();
    thread::sleep(Duration::from_secs(3));
    one.thaw();
    wait_until("the file is empty", || served.spilled() == Bytes::ZERO);
    served.check_all(1);
}

#[test]
fn a_lender_that_comes_back_empty_takes_nothing_from_the_file() {
    if cannot_run() {
        return;
    }
    let spills = Spills::new();
    let (mut one, served) = coming_back(&spills);
    one.kill();
    one.restart_empty();
    // If all pages had left the file by then, nothing asks the lender.
    wait_until("the engine knows that the lender has lost its pages", || {
        served.status().volume.leases[0].state == LeaseState::Lost
            || served.spilled() == Bytes::ZERO
    });
    let moved: Vec<_> = client::extents(&served.files)
        .unwrap()
        .into_iter()
        .map(|extent| extent.from.0 / EXTENT_SIZE)
        .collect();
    assert!(!moved.is_empty());
    let of_extent = EXTENT_SIZE / PAGE_SIZE as u64;
    for page in pages().filter(|page| !moved.contains(&(page / of_extent))) {
        served.check(page, 1);
    }
    let spilled = Bytes((EXTENTS - moved.len() as u64) * EXTENT_SIZE);
    assert_eq!(served.spilled(), spilled, "no more pages go to that lender");
}

#[test]
fn a_lost_file_costs_only_the_pages_in_it() {
    if cannot_run() {
        return;
    }
    let ([one], spills) = (lenders(), Spills::new());
    let served = Served::with(|spec| {
        spec.leases = vec![one.lease(1)];
        spec.paging.fault_timeout = Some(Duration::from_millis(100));
    });
    served.write_all(1);
    served.spill(1, &spills.directory()).unwrap();
    let away = spills.0.path().join("away");
    fs::rename(&spills.files()[0], &away).unwrap();
    served.kill_engine();
    assert_eq!(served.spilled(), SIZE);
    let all = client::all_pages(&served.files).unwrap();
    let states = client::states(&served.files, all).unwrap();
    let is_here =
        |page: &u64| matches!(states[*page as usize], PageState::Resident | PageState::Dirty);
    let here: Vec<_> = pages().filter(is_here).collect();
    assert!(!here.is_empty());
    here.into_iter().for_each(|page| served.check(page, 1));
    fs::rename(&away, spills.directory().join(file_name(&served))).unwrap();
    served.kill_engine();
    served.check_all(1);
}

/// Returns the name of the region's spill file on record.
fn file_name(served: &Served) -> std::ffi::OsString {
    let spill = client::record(&served.files).unwrap().spill.unwrap();
    spill.path.file_name().unwrap().to_owned()
}

#[test]
fn an_empty_file_that_is_lost_is_replaced() {
    if cannot_run() {
        return;
    }
    let spills = Spills::new();
    let (one, served) = in_a_file(&spills);
    served.add(one.lease(1)).unwrap();
    wait_until("the file is empty", || served.spilled() == Bytes::ZERO);
    fs::remove_dir_all(spills.directory()).unwrap();
    served.kill_engine();
    served.check_all(1);
    served.spill(1, &spills.directory()).unwrap();
    served.kill_engine();
    served.check_all(1);
}

#[test]
fn pages_come_home_from_the_file_once_the_cache_is_whole() {
    if cannot_run() {
        return;
    }
    let spills = Spills::new();
    let (_one, served) = in_a_file(&spills);
    client::resize_cache(&served.files, SIZE, client::By::Operator).unwrap();
    assert_eq!(served.spilled(), Bytes::ZERO);
    drop(client::send(&served.files).unwrap());
    served.check_all(1);
    served.kill_engine();
    served.check_all(1);
}

#[test]
fn discarded_pages_free_the_file() {
    if cannot_run() {
        return;
    }
    let spills = Spills::new();
    let (_one, served) = in_a_file(&spills);
    let first_extent = EXTENT_SIZE / PAGE_SIZE as u64;
    client::drop_pages(&served.files, Run { first: 0, count: first_extent }).unwrap();
    assert_eq!(served.spilled(), Bytes((EXTENTS - 1) * EXTENT_SIZE));
    for page in pages().filter(|page| *page >= first_extent) {
        served.check(page, 1);
    }
    // Its place in the file is used again.
    served.write_all(2);
    wait_until("pages left", || served.status().usage.resident <= CACHE);
    served.check_all(2);
    assert_eq!(served.spilled(), SIZE);
}

#[test]
fn a_region_with_spilled_pages_stays_on_its_host() {
    if cannot_run() {
        return;
    }
    let spills = Spills::new();
    let (one, served) = in_a_file(&spills);
    let refused = client::send(&served.files).unwrap_err().to_string();
    assert!(refused.contains("in the spill file of this host"), "{refused}");
    served.check_all(1);
    served.add(one.lease(1)).unwrap();
    wait_until("the file is empty", || served.spilled() == Bytes::ZERO);
    drop(client::send(&served.files).unwrap());
    wait_until("the hand-over has ended", || served.evacuate(77).is_ok());
    served.check_all(1);
}

/// A tmpfs that its drop unmounts.
struct Mount(PathBuf);

impl Mount {
    fn new(at: &Path, options: &str) -> Self {
        let mount = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "none"])
            .arg(at)
            .status();
        assert!(mount.unwrap().success());
        Self(at.to_owned())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let unmounted = std::process::Command::new("umount").arg("-l").arg(&self.0).status();
        assert!(thread::panicking() || unmounted.unwrap().success());
    }
}
