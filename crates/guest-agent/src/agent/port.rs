//! The guest's end of the host's port.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::message::PORT;

/// The result of opening the port.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) file: OwnedFd,
    /// Whether the file works again after the host has gone and come back.
    pub(super) lasting: bool,
}

/// The location of the port.
#[derive(Debug)]
pub(super) struct Port {
    /// The path, if one was given.
    named: Option<PathBuf>,
    root: PathBuf,
}

impl Port {
    /// Takes the port at `named`, or else the virtio-serial port with Aquifer's name.
    pub(super) fn new(named: Option<PathBuf>, root: &Path) -> Self {
        Self { named, root: root.to_owned() }
    }

    /// Opens the port in non-blocking mode. A unix socket serves as well.
    ///
    /// # Errors
    /// If there is no port, or another process holds it.
    pub(super) fn open(&self) -> io::Result<Opened> {
        let path = match &self.named {
            Some(path) => path.clone(),
            None => self.find().ok_or_else(|| {
                let what = format!("this machine has no virtio-serial port '{PORT}'");
                io::Error::new(io::ErrorKind::NotFound, what)
            })?,
        };
        if fs::metadata(&path)?.file_type().is_socket() {
            let stream = UnixStream::connect(&path)?;
            stream.set_nonblocking(true)?;
            return Ok(Opened { file: stream.into(), lasting: false });
        }
        let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
        Ok(Opened { file: file.into(), lasting: true })
    }

    /// Finds the port by udev's link or, without udev, by the kernel's names.
    fn find(&self) -> Option<PathBuf> {
        let link = self.root.join("dev/virtio-ports").join(PORT);
        if link.exists() {
            return Some(link);
        }
        let ports = fs::read_dir(self.root.join("sys/class/virtio-ports")).ok()?;
        let ours = ports.flatten().find(|port| {
            fs::read_to_string(port.path().join("name")).is_ok_and(|name| name.trim() == PORT)
        })?;
        Some(self.root.join("dev").join(ours.file_name()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    #[test]
    fn without_udev_the_port_is_found_by_the_kernels_names() {
        let root = tempfile::tempdir().unwrap();
        let class = root.path().join("sys/class/virtio-ports");
        for (port, name) in
            [("vport1p1", "com.redhat.spice.0\n"), ("vport1p2", "org.aquifer.guest.0\n")]
        {
            fs::create_dir_all(class.join(port)).unwrap();
            fs::write(class.join(port).join("name"), name).unwrap();
        }
        let port = Port::new(None, root.path());
        assert_eq!(port.find(), Some(root.path().join("dev/vport1p2")));
        assert_eq!(
            Port::new(None, &root.path().join("dev")).open().unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
    }
}
