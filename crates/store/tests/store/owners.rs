//! Tests of directories in which another user may have placed files.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::path::Path;

use aquifer_store::{Store, StoreError};

use crate::common::shm_dir;

/// A user id that is neither root's nor this process's.
const OTHER: u32 = 61_234;

const PRECIOUS: &str = "not the store's";

/// Asserts that the store refuses `dir` and names `named`, and that the file at `precious` is
/// unchanged.
#[track_caller]
fn is_refused(dir: &Path, named: &Path, precious: &Path) {
    let refused = Store::open(dir).map(drop);
    assert_eq!(fs::read_to_string(precious).unwrap(), PRECIOUS, "after {refused:?}");
    let error = refused.unwrap_err().to_string();
    assert!(error.contains(&format!("{} ", named.display())), "{error}");
}

#[test]
fn a_directory_that_another_user_made_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: needs root to make another user's directory");
    }
    let own = shm_dir();
    let precious = own.path().join("precious");
    fs::write(&precious, PRECIOUS).unwrap();
    let theirs = own.path().join("theirs");
    fs::create_dir(&theirs).unwrap();
    symlink(&precious, theirs.join("lock")).unwrap();
    chown(&theirs, Some(OTHER), None).unwrap();
    is_refused(&theirs, &theirs, &precious);
    is_refused(&theirs.join("below"), &theirs, &precious);
    assert!(!theirs.join("below").exists());
}

#[test]
fn a_directory_to_which_others_may_write_is_refused() {
    let own = shm_dir();
    let precious = own.path().join("precious");
    fs::write(&precious, PRECIOUS).unwrap();
    let open = own.path().join("open");
    fs::create_dir(&open).unwrap();
    for mode in [0o770, 0o707, 0o1777] {
        fs::set_permissions(&open, fs::Permissions::from_mode(mode)).unwrap();
        is_refused(&open, &open, &precious);
    }
    // Under the sticky bit only its owner can replace an entry, so a directory of ours is safe.
    Store::open(&open.join("ours")).unwrap();
}

#[test]
fn no_symbolic_link_is_followed() {
    let own = shm_dir();
    let precious = own.path().join("precious");
    fs::write(&precious, PRECIOUS).unwrap();
    let (real, link) = (own.path().join("real"), own.path().join("link"));
    fs::create_dir(&real).unwrap();
    symlink(&real, &link).unwrap();
    is_refused(&link, &link, &precious);
    is_refused(&link.join("below"), &link, &precious);
    symlink(&precious, real.join("lock")).unwrap();
    let refused = Store::open(&real).unwrap_err();
    assert!(matches!(refused, StoreError::File { .. }), "{refused}");
    assert_eq!(fs::read_to_string(&precious).unwrap(), PRECIOUS);
}
