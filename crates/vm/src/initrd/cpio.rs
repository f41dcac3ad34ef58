//! A writer of cpio archives in the kernel's format ("newc",
//! Documentation/driver-api/early-userspace/buffer-format.rst).

use std::collections::BTreeSet;
use std::path::Path;

const DIRECTORY: u32 = 0o040_755;
const FILE: u32 = 0o100_755;

/// An unfinished archive.
#[derive(Debug, Default)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    directories: BTreeSet<String>,
}

impl Archive {
    /// Adds a directory and its parents, each once.
    pub(super) fn directory(&mut self, path: &str) {
        let path = path.trim_matches('/');
        if path.is_empty() || !self.directories.insert(path.to_owned()) {
            return;
        }
        if let Some(parent) = Path::new(path).parent().and_then(Path::to_str) {
            self.directory(parent);
        }
        self.entry(path, DIRECTORY, &[]);
    }

    /// Adds an executable file and its parent directories.
    pub(super) fn file(&mut self, path: &str, content: &[u8]) {
        let path = path.trim_matches('/');
        if let Some(parent) = Path::new(path).parent().and_then(Path::to_str) {
            self.directory(parent);
        }
        self.entry(path, FILE, content);
    }

    /// Appends the trailer and returns the archive.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let links = if mode == DIRECTORY { 2 } else { 1 };
        let (size, name_size) = (content.len(), name.len() + 1);
        // Magic, inode, mode, uid, gid, nlink, mtime, file size, device (major, minor), rdev
        // (major, minor), name size, checksum.
        let header = format!(
            "070701{:08x}{mode:08x}{:08x}{:08x}{links:08x}{:08x}{size:08x}\
             {:08x}{:08x}{:08x}{:08x}{name_size:08x}{:08x}",
            self.entries, 0, 0, 0, 0, 0, 0, 0, 0
        );
        self.bytes.extend_from_slice(header.as_bytes());
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn an_archive_lists_its_entries() {
        let mut archive = Archive::default();
        archive.file("/usr/bin/one", b"1");
        archive.file("usr/bin/three", b"333");
        archive.directory("/dev");
        let mut cpio = Command::new("busybox");
        cpio.args(["cpio", "-t"])
            .stderr(Stdio::null())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut cpio = cpio.spawn().unwrap();
        cpio.stdin.take().unwrap().write_all(&archive.finish()).unwrap();
        let listed = String::from_utf8(cpio.wait_with_output().unwrap().stdout).unwrap();
        assert_eq!(listed, "usr\nusr/bin\nusr/bin/one\nusr/bin/three\ndev\n");
    }
}
