//! A controller of the kernel's NVMe initiator, through sysfs.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_nvme::proto::Nqn;
use aquifer_page::Bytes;

use super::super::{NvmeError, Root};

const CLASS: &str = "/sys/class/nvme";

/// Interval of polling sysfs.
const PERIOD: Duration = Duration::from_millis(20);

/// Time that the kernel may take to remove a controller: it first waits for the lender's reply.
const TIMEOUT: Duration = Duration::from_secs(90);

/// A connection of the kernel's initiator to a subsystem, `nvmeN`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Controller {
    root: Root,
    name: String,
}

impl Controller {
    pub(super) fn new(root: &Root, name: &str) -> Self {
        Self { root: root.clone(), name: name.to_owned() }
    }

    /// Finds all controllers that connect the host NQN `host` to the subsystem NQN `subsystem`,
    /// including those made by other processes.
    ///
    /// # Errors
    /// Fails if sysfs cannot be read.
    pub fn find(root: &Root, subsystem: &Nqn, host: &Nqn) -> Result<Vec<Self>, NvmeError> {
        let names =
            root.names(CLASS).map_err(NvmeError::io(format_args!("cannot read {CLASS}")))?;
        let all = names.iter().map(|name| Self::new(root, name));
        let is =
            |it: &Self, attribute, nqn: &Nqn| it.read(attribute).as_deref() == Some(nqn.as_str());
        Ok(all.filter(|it| is(it, "subsysnqn", subsystem) && is(it, "hostnqn", host)).collect())
    }

    /// Returns the kernel's name of the controller, `nvmeN`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the kernel's state of the controller: `live` while the lender answers, `connecting`
    /// while it does not. It is `gone` if there is no such controller.
    pub fn state(&self) -> String {
        self.read("state").unwrap_or_else(|| "gone".to_owned())
    }

    /// Returns the block device of the namespace with the lowest number, once its node exists and
    /// its size is known.
    ///
    /// # Errors
    /// Fails if sysfs cannot be read.
    pub fn device(&self) -> Result<Option<PathBuf>, NvmeError> {
        let names = self
            .root
            .names(self.dir())
            .map_err(NvmeError::io("cannot look for the block device"))?;
        let first =
            names.iter().filter_map(|name| namespace(name)).min_by_key(|(number, _)| *number);
        let device = first.map(|(_, head)| Path::new("/dev").join(head));
        Ok(device
            .filter(|device| self.root.path(device).exists() && self.size(device) > Bytes::ZERO))
    }

    /// Returns the size of a block device, zero if it is unknown.
    pub fn size(&self, device: &Path) -> Bytes {
        let name = device.file_name().unwrap_or_default();
        let sectors = self.root.read(Path::new("/sys/block").join(name).join("size"));
        Bytes(sectors.and_then(|text| text.parse::<u64>().ok()).unwrap_or(0) * 512)
    }

    /// Waits until the block device can be opened.
    ///
    /// # Errors
    /// Fails if no block device appears within `io_timeout`: the subsystem has no namespace, or the
    /// connection broke.
    pub fn wait_for_device(&self, io_timeout: Duration) -> Result<PathBuf, NvmeError> {
        let deadline = Instant::now() + io_timeout;
        loop {
            if let Some(device) = self.device()?
                && opens(&self.root.path(&device))
            {
                return Ok(device);
            }
            if Instant::now() > deadline {
                let state = self.state();
                return Err(NvmeError::new(format!(
                    "no block device appeared for {} ({state})",
                    self.name
                ))
                .help("check that the lender's subsystem has an enabled namespace"));
            }
            thread::sleep(PERIOD);
        }
    }

    /// Disconnects and waits until the controller is gone. I/O to its block device fails from then
    /// on.
    ///
    /// # Errors
    /// Fails if the kernel refuses or takes too long. A controller that is gone already is no
    /// error.
    pub fn delete(&self) -> Result<(), NvmeError> {
        let dir = self.root.path(self.dir());
        if !dir.exists() {
            return Ok(());
        }
        match self.root.write(self.dir().join("delete_controller"), "1") {
            // A controller that is being removed lacks this file or returns `ENODEV`.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => {}
            written => {
                written.map_err(NvmeError::io(format_args!("cannot disconnect {}", self.name)))?
            }
        }
        let deadline = Instant::now() + TIMEOUT;
        while dir.exists() {
            if Instant::now() > deadline {
                return Err(NvmeError::io(format_args!("{} does not disconnect", self.name))(
                    io::ErrorKind::TimedOut.into(),
                ));
            }
            thread::sleep(PERIOD);
        }
        Ok(())
    }

    fn dir(&self) -> PathBuf {
        Path::new(CLASS).join(&self.name)
    }

    fn read(&self, attribute: &str) -> Option<String> {
        self.root.read(self.dir().join(attribute))
    }
}

/// Tells whether a device can be opened: the kernel creates the node before it accepts opens
/// (`device_add_disk`). Other errors count as success here, since the device's user meets them too.
fn opens(device: &Path) -> bool {
    let error = File::open(device).err().and_then(|error| error.raw_os_error());
    !matches!(error, Some(libc::ENOENT | libc::ENXIO))
}

/// Parses a controller's entry into the number of a namespace and the name of its block device.
///
/// The entry is either the block device `nvmeSnN` itself, or `nvmeScCnN`, one path to that block
/// device (native multipathing).
fn namespace(entry: &str) -> Option<(u32, String)> {
    let (before, number) = entry.strip_prefix("nvme")?.rsplit_once('n')?;
    let subsystem = before.split('c').next()?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let well_formed = before.split('c').count() <= 2 && before.split('c').all(is_number);
    let number = number.parse().ok().filter(|_| well_formed)?;
    Some((number, format!("nvme{subsystem}n{number}")))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Imitates a host with one controller and a device of `sectors` sectors.
    fn host(entry: &str, sectors: u64) -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        for (path, text) in [
            (
                "/sys/class/nvme/nvme1/subsysnqn".to_owned(),
                "nqn.2014-08.org.example:a\n".to_owned(),
            ),
            ("/sys/class/nvme/nvme1/hostnqn".to_owned(), "nqn.2014-08.org.example:h\n".to_owned()),
            ("/sys/class/nvme/nvme1/state".to_owned(), "live\n".to_owned()),
            (format!("/sys/class/nvme/nvme1/{entry}/wwid"), String::new()),
            ("/sys/block/nvme0n1/size".to_owned(), format!("{sectors}\n")),
            ("/dev/nvme0n1".to_owned(), String::new()),
            // A local disk, which is not a fabrics controller.
            (
                "/sys/class/nvme/nvme7/subsysnqn".to_owned(),
                "nqn.2014-08.org.example:a\n".to_owned(),
            ),
        ] {
            let path = root.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        (dir, root)
    }

    fn find(root: &Root, host: &str) -> Vec<Controller> {
        Controller::find(
            root,
            &"nqn.2014-08.org.example:a".parse().unwrap(),
            &host.parse().unwrap(),
        )
        .unwrap()
    }

    #[test]
    fn a_controller_is_found_by_both_names_and_leads_to_its_device() {
        for entry in ["nvme0n1", "nvme0c1n1"] {
            let (_dir, root) = host(entry, 2048);
            let [controller] = find(&root, "nqn.2014-08.org.example:h").try_into().unwrap();
            assert_eq!((controller.name(), controller.state().as_str()), ("nvme1", "live"));
            let device = controller.wait_for_device(Duration::ZERO).unwrap();
            assert_eq!(
                (device.as_path(), controller.size(&device)),
                (Path::new("/dev/nvme0n1"), Bytes::mib(1))
            );
            assert_eq!(find(&root, "nqn.2014-08.org.example:other"), []);
        }
    }

    #[test]
    fn a_subsystem_without_a_namespace_is_an_error() {
        let (_dir, root) = host("power", 0);
        let controller = find(&root, "nqn.2014-08.org.example:h").remove(0);
        let error = controller.wait_for_device(Duration::ZERO).unwrap_err();
        assert!(error.why.contains("nvme1 (live)") && error.help.is_some(), "{error}");
    }

    #[test]
    fn a_device_that_cannot_be_opened_yet_is_waited_for() {
        let (_dir, root) = host("nvme0n1", 2048);
        let controller = find(&root, "nqn.2014-08.org.example:h").remove(0);
        // Opening a socket fails with ENXIO, too.
        let path = root.path("/dev/nvme0n1");
        fs::remove_file(&path).unwrap();
        let socket = UnixListener::bind(&path).unwrap();
        controller.wait_for_device(Duration::ZERO).unwrap_err();

        let kernel = thread::spawn(move || {
            thread::sleep(PERIOD * 2);
            drop(socket);
            fs::write(path.with_extension("new"), "").unwrap();
            fs::rename(path.with_extension("new"), path).unwrap();
        });
        controller.wait_for_device(TIMEOUT).unwrap();
        kernel.join().unwrap();
    }

    #[test]
    fn entries_that_are_no_namespaces_are_passed_over() {
        assert_eq!(namespace("nvme12c3n4"), Some((4, "nvme12n4".to_owned())));
        for entry in
            ["nvme0", "nvmen1", "nvme0cn1", "nvme0c1c2n1", "nvme-fabrics", "ng0n1", "hwmon0"]
        {
            assert_eq!(namespace(entry), None, "{entry}");
        }
    }

    #[test]
    fn a_controller_that_is_gone_needs_no_deleting() {
        let dir = tempfile::tempdir().unwrap();
        let gone = Controller::new(&Root::at(dir.path()), "nvme5");
        assert_eq!(gone.state(), "gone");
        gone.delete().unwrap();
    }
}
