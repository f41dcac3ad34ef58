//! Tests of a group's frames, without leases.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use aquifer_page::{PAGE_SIZE, lock};

use super::frames::GroupFrames;
use crate::ram::RamLock;

fn frames() -> GroupFrames {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    GroupFrames::new(file, Arc::new(RamLock::new("/dev/shm".into()))).unwrap()
}

fn figures(frames: &GroupFrames) -> [u64; 3] {
    let counters = &frames.counters;
    [counters.references.get(), counters.frames.get(), counters.shared.get()]
}

#[test]
fn a_content_has_one_frame_until_nobody_refers_to_it() {
    let frames = frames();
    let [first, second] = [1; 2].map(|byte| frames.share(&[byte; PAGE_SIZE]).unwrap());
    let other = frames.share(&[2; PAGE_SIZE]).unwrap();
    assert!(first == second && first != other);
    assert_eq!(figures(&frames), [3, 2, 1]);
    assert!(frames.release(first));
    assert_eq!(figures(&frames), [2, 2, 0]);
    assert_eq!(frames.bytes(second..second + 1), [1; PAGE_SIZE]);
    assert!(!frames.release(second) && !frames.release(other));
    assert_eq!(figures(&frames), [0, 0, 0]);
    frames.trim();
    assert_eq!((frames.usage().taken.0, frames.file.taken().unwrap()), (0, 0));
}

#[test]
fn the_same_contents_look_different_in_each_group() {
    let groups = [frames(), frames()];
    let mut found = HashSet::new();
    for number in 0..10_000_u32 {
        let mut content = [7; PAGE_SIZE];
        content[..4].copy_from_slice(&number.to_le_bytes());
        for frames in &groups {
            let frame = frames.share(&content).unwrap();
            let kept = frames.file.meta(frame).fingerprint.load(Ordering::Relaxed);
            assert!(kept == frames.key.fingerprint(&content) && found.insert(kept));
        }
    }
    groups.iter().for_each(|frames| assert_eq!(figures(frames), [10_000, 10_000, 0]));
}

#[test]
fn contents_that_only_look_the_same_are_kept_apart() {
    let frames = frames();
    let (looked_for, there) = ([1; PAGE_SIZE], [2; PAGE_SIZE]);
    let fingerprint = frames.key.fingerprint(&looked_for);
    let wrong = frames.share(&there).unwrap();
    lock(frames.shard_of(frames.key.fingerprint(&there))).remove(&frames.file, wrong);
    assert_eq!(frames.publish(wrong, fingerprint, &there), None);

    let [first, second] = [1; 2].map(|_| frames.share(&looked_for).unwrap());
    assert!(first != wrong && second != wrong && first != second, "only one of them can be found");
    assert_eq!(frames.bytes(first..first + 1), looked_for);
    assert_eq!(frames.bytes(second..second + 1), looked_for);
    assert_eq!(figures(&frames), [3, 3, 0]);
    for frame in [first, second] {
        assert!(!frames.release(frame));
    }
    let home = lock(frames.shard_of(fingerprint));
    assert_eq!(
        home.find(&frames.file, fingerprint),
        Some(wrong),
        "the index still has the one that was there"
    );
}

#[test]
fn a_frame_is_refilled_only_by_its_single_holder() {
    let frames = frames();
    let [old, new, newest] = [1, 2, 3].map(|byte| [byte; PAGE_SIZE]);
    let frame = frames.share(&old).unwrap();
    assert_eq!(frames.share(&old).unwrap(), frame);
    assert_eq!(frames.rewrite(frame, &new), None, "others have it");
    frames.release(frame);
    assert_eq!(frames.rewrite(frame, &new), Some(frame));
    assert_eq!(frames.share(&new).unwrap(), frame, "it is found by what it has now");
    frames.release(frame);
    assert_ne!(frames.share(&old).unwrap(), frame);
    let there = frames.share(&newest).unwrap();
    assert_eq!(frames.rewrite(frame, &newest), Some(there), "what is there already is shared");
    frames.release(frame);
    assert_eq!(figures(&frames), [3, 2, 1]);
}

/// Waits until `threads` threads arrive for the `round`th time. Spins, so that they continue at the
/// same moment.
fn meet(came: &AtomicUsize, threads: usize, round: usize) {
    came.fetch_add(1, Ordering::SeqCst);
    let mut spins = 0;
    while came.load(Ordering::SeqCst) < threads * round {
        spins += 1;
        if spins % 10_000 == 0 {
            // The other thread may wait for a processor.
            thread::yield_now();
        }
    }
}

#[test]
fn equal_pages_stored_at_the_same_time_share_a_frame() {
    const ROUNDS: usize = 20_000;
    let frames = frames();
    let (came, got) = (AtomicUsize::new(0), [const { AtomicUsize::new(0) }; 2]);
    thread::scope(|scope| {
        for number in 0..2 {
            let (frames, came, got) = (&frames, &came, &got);
            scope.spawn(move || {
                let mut content = [1; PAGE_SIZE];
                for round in 0..ROUNDS {
                    content[..8].copy_from_slice(&round.to_le_bytes());
                    meet(came, 2, 3 * round + 1);
                    let frame = frames.share(&content).unwrap();
                    got[number].store(frame as usize, Ordering::SeqCst);
                    meet(came, 2, 3 * round + 2);
                    assert_eq!(
                        got[0].load(Ordering::SeqCst),
                        got[1].load(Ordering::SeqCst),
                        "round {round}"
                    );
                    meet(came, 2, 3 * round + 3);
                    frames.release(frame);
                }
            });
        }
    });
    assert_eq!(figures(&frames), [0, 0, 0]);
}

#[test]
fn a_frame_found_while_its_last_reference_goes_keeps_its_data() {
    let frames = frames();
    let failed = AtomicBool::new(false);
    thread::scope(|scope| {
        for number in 0..4_u8 {
            let (frames, failed) = (&frames, &failed);
            scope.spawn(move || {
                for round in 0..100_000_u32 {
                    // Two contents that all threads use, and one of the thread's own that takes
                    // frames that become free.
                    let byte = if round % 3 == 2 { 100 + number } else { 1 + (round % 3) as u8 };
                    let content = [byte; PAGE_SIZE];
                    let frame = frames.share(&content).unwrap();
                    if round % 16 == 0 {
                        thread::yield_now();
                    }
                    let same = frames.bytes(frame..frame + 1) == content;
                    failed.fetch_or(!same, Ordering::Relaxed);
                    frames.release(frame);
                }
            });
        }
    });
    assert!(!failed.into_inner());
    assert_eq!(figures(&frames), [0, 0, 0]);
}
