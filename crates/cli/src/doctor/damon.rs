//! The check for DAMON, the kernel's monitor of accesses, which can swap out pages on its own.

use std::fs;
use std::path::{Path, PathBuf};

use super::Check;

const NAME: &str = "damon";

/// Checks the files of DAMON under `sys`; those that this process cannot read count as inactive.
pub(super) fn check(sys: &Path) -> Check {
    let active = active(sys);
    if active.is_empty() {
        return Check::ok(NAME, "not active as far as this process can read");
    }
    let active: Vec<_> = active.iter().map(|file| file.display().to_string()).collect();
    Check::warn(
        NAME,
        format!(
            "active ({}): it clears the accessed bits by which the kernel chooses pages to swap \
             out, and may swap pages to lenders before memory is short",
            active.join(", ")
        ),
        "write 'off' to a kdamond's state, or 'N' to a module's enabled",
    )
}

/// Returns the files that say that a monitor runs.
fn active(sys: &Path) -> Vec<PathBuf> {
    let threads = children(&sys.join("kernel/mm/damon/admin/kdamonds"));
    let threads = threads.into_iter().map(|thread| (thread.join("state"), "on"));
    let is_damon = |module: &PathBuf| {
        module.file_name().is_some_and(|it| it.as_encoded_bytes().starts_with(b"damon_"))
    };
    let modules = children(&sys.join("module")).into_iter().filter(is_damon);
    let modules = modules.map(|module| (module.join("parameters/enabled"), "Y"));
    let is_on = |(file, on): &(PathBuf, &str)| {
        fs::read_to_string(file).is_ok_and(|text| text.trim() == *on)
    };
    threads.chain(modules).filter(is_on).map(|(file, _)| file).collect()
}

/// Returns the paths in a directory in order; none if it cannot be read.
fn children(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn each_monitor_that_runs_is_named() {
        let sys = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let file = sys.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        assert_eq!(check(sys.path()).verdict, Verdict::Ok);
        write("kernel/mm/damon/admin/kdamonds/nr_kdamonds", "2\n");
        write("kernel/mm/damon/admin/kdamonds/0/state", "off\n");
        write("module/damon_reclaim/parameters/enabled", "N\n");
        write("module/zswap/parameters/enabled", "Y\n");
        assert_eq!(check(sys.path()).verdict, Verdict::Ok);

        write("kernel/mm/damon/admin/kdamonds/1/state", "on\n");
        write("module/damon_reclaim/parameters/enabled", "Y\n");
        let found = check(sys.path());
        assert_eq!(found.verdict, Verdict::Warn);
        for named in ["kdamonds/1/state", "damon_reclaim/parameters/enabled"] {
            assert!(found.found.contains(named), "{found:?}");
        }
        assert!(!found.found.contains("kdamonds/0"), "{found:?}");
    }
}
