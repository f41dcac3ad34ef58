//! Tests of the account of guests' memory.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs::File;
use std::os::unix::net::UnixListener;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use aquifer_control_socket::ControlCall;

use super::*;

fn budget() -> (tempfile::TempDir, Budget) {
    let dir = tempfile::tempdir().unwrap();
    let budget = Budget::of(dir.path());
    budget.set(Some(Bytes::mib(1024)), None).unwrap();
    (dir, budget)
}

/// Creates a VM as far as the account needs one.
fn start(
    dir: &tempfile::TempDir,
    budget: &Budget,
    vm: &str,
    share: &Share,
) -> Result<RegionName, VmError> {
    let vm: RegionName = vm.parse().unwrap();
    let files = dir.path().join("vms").join(vm.as_str());
    fs::create_dir_all(&files).unwrap();
    // A record that cannot be read does not prove that the VM is gone.
    fs::write(files.join("record.json"), "{}").unwrap();
    budget.admit(&vm, share).map(|()| vm)
}

fn local(budget: &Budget) -> (u64, u64, u64) {
    let Accounts { local, promised, vms, .. } = budget.accounts().unwrap();
    assert_eq!(local.reserved, local.used + local.free);
    assert_eq!(local.used, vms.values().map(|share| share.local).sum());
    assert!(promised <= local.free);
    (local.used.0 >> 20, local.free.0 >> 20, promised.0 >> 20)
}

#[test]
fn no_more_is_given_than_was_set_aside() {
    let (dir, budget) = budget();
    let one = start(&dir, &budget, "one", &Share::local(Bytes::mib(512))).unwrap();
    let two = start(&dir, &budget, "two", &Share::local(Bytes::mib(256))).unwrap();
    assert!(matches!(
        start(&dir, &budget, "three", &Share::local(Bytes::mib(512))),
        Err(VmError::NoRoom { .. })
    ));
    budget.grow(&one, Bytes::mib(128), false).unwrap();
    assert!(matches!(budget.grow(&two, Bytes::mib(256), true), Err(VmError::NoRoom { .. })));
    assert_eq!(local(&budget), (896, 128, 0));
    assert!(
        budget.set(Some(Bytes::mib(895)), None).unwrap_err().to_string().contains("896MiB already")
    );
    budget.settle(&one, Bytes::mib(512)).unwrap();
    budget.grow(&two, Bytes::mib(256), false).unwrap();
    assert_eq!(local(&budget), (1024, 0, 0));
    budget.forget(&two).unwrap();
    assert_eq!(local(&budget), (512, 512, 0));
}

#[test]
fn a_reserve_serves_only_its_vm_if_urgent_and_is_refilled_later() {
    let (dir, budget) = budget();
    let one = start(&dir, &budget, "one", &Share::local(Bytes::mib(512))).unwrap();
    let two = start(&dir, &budget, "two", &Share::local(Bytes::mib(256))).unwrap();
    budget.promise(&one, Bytes::mib(128)).unwrap();
    budget.grow(&two, Bytes::mib(128), false).unwrap();
    for (vm, urgent) in [(&two, false), (&two, true), (&one, false)] {
        assert!(matches!(budget.grow(vm, Bytes::mib(128), urgent), Err(VmError::NoRoom { .. })));
    }
    assert!(matches!(budget.promise(&two, Bytes::mib(1)), Err(VmError::NoRoom { .. })));
    budget.grow(&one, Bytes::mib(128), true).unwrap();
    assert_eq!(local(&budget), (1024, 0, 0));
    budget.settle(&one, Bytes::mib(576)).unwrap();
    assert_eq!(local(&budget), (960, 64, 64));
    budget.settle(&one, Bytes::mib(512)).unwrap();
    assert_eq!(local(&budget), (896, 128, 128));
}

#[test]
fn a_pooled_vm_takes_only_its_cache_from_the_host() {
    let (dir, budget) = budget();
    let share = Share::pool(Bytes::mib(512), Bytes::mib(2048), Bytes::mib(256));
    let vm = start(&dir, &budget, "one", &share).unwrap();
    budget.grow(&vm, Bytes::mib(1536), false).unwrap();
    assert!(matches!(budget.grow(&vm, Bytes::mib(1), false), Err(VmError::NoRoom { .. })));
    assert_eq!(local(&budget), (256, 768, 0));
    let pool = budget.accounts().unwrap().pool;
    assert_eq!(
        pool,
        Account { reserved: Bytes::mib(2048), used: Bytes::mib(2048), free: Bytes::ZERO }
    );
    assert!(matches!(budget.promise(&vm, Bytes::mib(1)), Err(VmError::Misuse(_))));
    budget.cache(&vm, Bytes::mib(1024), By::Operator).unwrap();
    assert!(matches!(
        budget.cache(&vm, Bytes::mib(1025), By::Operator),
        Err(VmError::NoRoom { .. })
    ));
    assert_eq!(local(&budget), (1024, 0, 0));
}

#[test]
fn a_vm_with_a_cache_of_the_agents_choice_counts_by_size() {
    let (dir, budget) = budget();
    let mut share = Share::auto(Bytes::mib(256), Bytes::mib(768), Bytes::mib(768));
    share.keep(Bytes::mib(128)).unwrap();
    let vm = start(&dir, &budget, "one", &share).unwrap();
    assert_eq!(local(&budget), (256, 768, 128));
    budget.grow(&vm, Bytes::mib(256), false).unwrap();
    assert_eq!(local(&budget), (512, 512, 128));
    // The cache bounds what the VM takes, and the rest of its memory is at lenders.
    budget.cache(&vm, Bytes::mib(384), By::Agent).unwrap();
    assert_eq!(local(&budget), (384, 640, 128));
    budget.grow(&vm, Bytes::mib(128), true).unwrap();
    assert_eq!(local(&budget), (384, 640, 128), "it draws on no reserve");
    assert_eq!(budget.in_need(&vm).unwrap(), (Bytes::mib(128), Bytes::mib(128)));
    budget.cache(&vm, Bytes::mib(768), By::Agent).unwrap();
    assert_eq!(local(&budget), (640, 384, 128));
    let accounts = budget.accounts().unwrap();
    assert_eq!(accounts.vms[&vm].memory(), Bytes::mib(640));
    assert_eq!(accounts.pool, Account::default(), "it has no leases of its own choice");
    // The operator's limit is promised in full, and a reserve beside it would serve nothing.
    let fixed = budget.cache(&vm, Bytes::mib(700), By::Operator);
    assert!(matches!(fixed, Err(VmError::Misuse(_))), "{fixed:?}");
    budget.promise(&vm, Bytes::ZERO).unwrap();
    // Its limit so far is larger than the budget has left, but bounds what it does not use.
    budget.cache_and_before(&vm, Bytes::mib(200), By::Operator).unwrap();
    assert_eq!(local(&budget), (640, 384, 0), "until the pages have left");
    budget.cache(&vm, Bytes::mib(200), By::Operator).unwrap();
    assert_eq!(local(&budget), (200, 824, 0));
    budget.cache_and_before(&vm, Bytes::mib(700), By::Operator).unwrap();
    assert_eq!(local(&budget), (700, 324, 0));
    budget.cache(&vm, Bytes::mib(700), By::Operator).unwrap();
    assert_eq!(local(&budget), (700, 324, 0));
    budget.grow(&vm, Bytes::mib(128), false).unwrap();
    assert_eq!(local(&budget), (700, 324, 0), "it grows in its leases");
    budget.settle(&vm, Bytes::mib(640)).unwrap();
    budget.cache(&vm, Bytes::mib(700), By::Agent).unwrap();
    assert_eq!(local(&budget), (640, 384, 0));
    let too_large = Share::auto(Bytes::mib(512), Bytes::mib(512), Bytes::mib(512));
    let refused = start(&dir, &budget, "two", &too_large);
    assert!(matches!(refused, Err(VmError::NoRoom { .. })), "{refused:?}");
}

#[test]
fn the_share_of_a_vanished_vm_is_free_again() {
    let (dir, budget) = budget();
    let vm = start(&dir, &budget, "one", &Share::local(Bytes::mib(512))).unwrap();
    fs::remove_dir_all(dir.path().join("vms").join(vm.as_str())).unwrap();
    assert_eq!(local(&budget), (0, 1024, 0));
}

/// Tests with a stopped QEMU: its monitor's backlog is full, so that connect(2) would block for
/// ever.
#[test]
fn a_silent_vm_keeps_its_share_and_blocks_no_process() {
    let (dir, budget) = budget();
    let silent: RegionName = "silent".parse().unwrap();
    let files = Files::new(dir.path(), &silent);
    let directory = dir.path().join("vms/silent");
    fs::create_dir_all(&directory).unwrap();
    let backing = crate::Backing::Local { huge: None };
    let spec = crate::VmSpec::new(silent.clone(), Bytes::mib(512), backing);
    let record = serde_json::json!({ "origin": { "started": spec }, "pid": 1, "ended": null });
    fs::write(directory.join("record.json"), record.to_string()).unwrap();
    let listener = UnixListener::bind(files.control()).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let short = Duration::from_millis(50);
    let mut queued = Vec::new();
    while let Ok(call) = ControlCall::connect(&files.control(), "fill", short) {
        queued.push(call);
    }
    budget.admit(&silent, &Share::local(Bytes::mib(512))).unwrap();

    // On a thread of its own, so that a blocking call fails this test.
    let (told, tells) = mpsc::channel();
    let asking = budget.clone();
    thread::spawn(move || told.send(asking.accounts()));
    let accounts = tells.recv_timeout(Duration::from_secs(30)).expect("the call returns").unwrap();
    assert_eq!(accounts.vms[&silent], Share::local(Bytes::mib(512)));
    // Once no process listens, QEMU is gone.
    drop(listener);
    drop(queued);
    assert_eq!(local(&budget), (0, 1024, 0));
}

#[test]
fn a_lock_that_is_never_given_back_is_named() {
    let (dir, budget) = budget();
    let lock = File::open(dir.path().join("guests.lock")).unwrap();
    lock.lock().unwrap();
    let error = budget.accounts().unwrap_err().to_string();
    assert!(error.contains("guests.lock") && error.contains("fuser"), "{error}");
    drop(lock);
    budget.accounts().unwrap();
}
