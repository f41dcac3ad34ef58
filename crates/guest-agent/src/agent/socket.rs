//! The socket at which applications connect to the agent.

use std::fs;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rustix::fs::{Gid, Mode, chmod, chown};
use rustix::process::umask;

/// Listens at `path` for applications of root, and of `group` if given.
///
/// # Errors
/// If another agent listens there, the group does not exist, or the socket cannot be made.
pub(super) fn listen(path: &Path, group: Option<&str>) -> io::Result<UnixListener> {
    let group = group.map(gid).transpose()?;
    if UnixStream::connect(path).is_ok() {
        let what = format!("another agent listens at {}", path.display());
        return Err(io::Error::new(io::ErrorKind::AddrInUse, what));
    }
    // A killed agent leaves its socket behind.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let before = umask(Mode::RWXG | Mode::RWXO | Mode::XUSR);
    let listener = UnixListener::bind(path);
    umask(before);
    let listener = listener?;
    if let Some(group) = group {
        chown(path, None, Some(group))?;
        chmod(path, Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP)?;
    }
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn gid(group: &str) -> io::Result<Gid> {
    let number = match group.parse() {
        Ok(number) => Some(number),
        Err(_) => number(&fs::read_to_string("/etc/group")?, group),
    };
    let unknown =
        || io::Error::new(io::ErrorKind::NotFound, format!("this machine has no group '{group}'"));
    number.filter(|number| *number != u32::MAX).map(Gid::from_raw).ok_or_else(unknown)
}

/// Finds a group's number in the text of /etc/group (group(5)).
fn number(groups: &str, name: &str) -> Option<u32> {
    groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_group_is_found_by_its_name_or_number() {
        let groups = "root:x:0:\nmemory:x:990:alice,bob\nbroken\n";
        assert_eq!(number(groups, "memory"), Some(990));
        assert_eq!(number(groups, "mem"), None);
        assert_eq!(gid("990").unwrap(), Gid::from_raw(990));
    }

    #[test]
    fn a_socket_is_private_and_replaces_only_one_of_a_killed_agent() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = listen(&path, None).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(listen(&path, None).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        listen(&path, None).unwrap();
    }
}
