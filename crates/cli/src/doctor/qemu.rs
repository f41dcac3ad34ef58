//! The check for QEMU, and the search for a program in PATH.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

use super::Check;

/// The program that `vm start` runs unless the command line names another one.
const PROGRAM: &str = "qemu-system-x86_64";

pub(super) fn check() -> Check {
    check_in(&std::env::var_os("PATH").unwrap_or_default())
}

fn check_in(path: &OsStr) -> Check {
    match find(Path::new(PROGRAM), path) {
        Some(program) => Check::ok("qemu", format!("{} exists", program.display())),
        None => Check::missing(
            "qemu",
            format!(
                "there is no {PROGRAM} in PATH: 'aquifer vm start' starts no VM, and no VM can \
                 migrate to this host"
            ),
            "install QEMU 7.0 or later (Debian: qemu-system-x86), or name it: 'vm start --qemu', \
             and vms.qemu for the agent",
        ),
    }
}

/// Returns the executable file of a program, which has a path of its own or is in `path`.
pub(super) fn find(program: &Path, path: &OsStr) -> Option<PathBuf> {
    let is_there = |file: &PathBuf| access(file, Access::EXEC_OK).is_ok() && file.is_file();
    match program.components().count() {
        1 => std::env::split_paths(path).map(|dir| dir.join(program)).find(is_there),
        _ => Some(program.to_owned()).filter(is_there),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::super::Verdict;
    use super::*;

    #[test]
    fn only_an_executable_qemu_in_path_counts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().as_os_str();
        let missing = check_in(path);
        assert_eq!(missing.verdict, Verdict::Missing);
        assert!(!missing.essential && missing.found.contains("'aquifer vm start'"), "{missing:?}");
        let program = dir.path().join(PROGRAM);
        fs::create_dir(&program).unwrap();
        assert_eq!(check_in(path).verdict, Verdict::Missing);
        fs::remove_dir(&program).unwrap();
        fs::write(&program, "").unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(check_in(path).verdict, Verdict::Ok);
        assert_eq!(find(&program, OsStr::new("")), Some(program));
    }
}
