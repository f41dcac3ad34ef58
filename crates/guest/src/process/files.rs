use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use aquifer_page::{Group, RegionName};
use aquifer_region::process::{Files as RegionFiles, GroupFiles, is_listening, record};
use rustix::process::{Pid, test_kill_process};

use super::message::{Origin, Record};
use crate::error::GuestError;
use crate::memory::{self, Limits};
use crate::migrate::{Awaited, Given};

/// The files of a VM: `RUN_DIR/vms/NAME/…`, and those of its region beside.
#[derive(Clone, Debug)]
pub struct Files {
    run_dir: PathBuf,
    name: RegionName,
}

/// The longest path that a unix socket can have.
const LONGEST: usize = 107;

impl Files {
    /// Of the VM `name`, under the directory where all that runs has its files.
    pub fn new(run_dir: &Path, name: &RegionName) -> Self {
        Self { run_dir: run_dir.to_owned(), name: name.clone() }
    }

    /// Those of all VMs there.
    pub(super) fn all(run_dir: &Path) -> io::Result<Vec<Self>> {
        let entries = match fs::read_dir(run_dir.join("vms")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut all = Vec::new();
        for entry in entries {
            let name = entry?.file_name().to_str().and_then(|name| name.parse().ok());
            all.extend(name.map(|name| Self::new(run_dir, &name)));
        }
        all.sort_by(|one, two| one.name.cmp(&two.name));
        Ok(all)
    }

    /// The VM's name.
    pub fn name(&self) -> &RegionName {
        &self.name
    }

    pub(crate) fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    /// What the VMs of a group have in common here.
    pub(super) fn group(&self, group: &Group) -> GroupFiles {
        GroupFiles::new(&self.run_dir.join("regions"), group)
    }

    /// Those of the region that is its memory.
    pub fn region(&self) -> RegionFiles {
        RegionFiles::new(&self.run_dir.join("regions"), &self.name)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.run_dir.join("vms").join(self.name.as_str()).join(name)
    }

    /// A monitor for whoever wants one.
    pub fn qmp(&self) -> PathBuf {
        self.file("qmp")
    }

    /// The monitor that this program uses.
    pub fn control(&self) -> PathBuf {
        self.file("control")
    }

    /// The monitor for who moves the VM, which may take its time.
    pub(crate) fn mover(&self) -> PathBuf {
        self.file("mover")
    }

    /// The port for the agent inside the guest.
    pub fn agent(&self) -> PathBuf {
        self.file("agent")
    }

    /// How long the stages of its resizes took.
    pub(crate) fn times(&self) -> PathBuf {
        self.file("times.json")
    }

    /// What its memory is kept within; where nobody has said anything, what it can be at all.
    pub(crate) fn limits(&self) -> Result<Limits, GuestError> {
        let path = self.file("limits.json");
        let read = record::read(&path)
            .map_err(GuestError::io(format!("cannot read {}", path.display())))?;
        Ok(read.unwrap_or(memory::UNLIMITED))
    }

    /// Keeps its memory within these from now on.
    pub(super) fn set_limits(&self, limits: &Limits) -> Result<(), GuestError> {
        let path = self.file("limits.json");
        record::write(&path, limits)
            .map_err(GuestError::io(format!("cannot write {}", path.display())))
    }

    /// Its QEMU's process, once there is one.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.read().ok()?.pid
    }

    /// Whether it may have memory: it runs, or is about to.
    pub(crate) fn has_memory(&self) -> bool {
        match self.read() {
            Ok(record) if record.ended.is_some() => false,
            Ok(record) => record.pid.is_none() || self.is_running() || self.is_kept(),
            Err(GuestError::Unknown(_)) => false,
            Err(_) => true,
        }
    }

    /// The model of processor that stands for all that its host offers, if the VM has that.
    pub(crate) fn whole_cpu(&self) -> Result<Option<&'static str>, GuestError> {
        match self.read()?.origin {
            Origin::Started(spec) => Ok(spec.whole_cpu()),
            Origin::Adopted { .. } => Ok(None),
        }
    }

    /// The guest's serial port, as a socket.
    pub fn serial(&self) -> PathBuf {
        self.file("serial")
    }

    /// What the guest has said on its serial port.
    pub fn console(&self) -> PathBuf {
        self.file("console.log")
    }

    /// What QEMU has to say.
    pub fn log(&self) -> PathBuf {
        self.file("log")
    }

    /// By what QEMUs of two hosts get the state of devices from one to the other.
    pub(crate) fn devices(&self) -> PathBuf {
        self.file("devices")
    }

    /// By what its keeper is asked.
    pub(super) fn keeper(&self) -> PathBuf {
        self.file("keeper")
    }

    /// Notes that the VM is another host's, or is not.
    pub(crate) fn give_away(&self, given: Option<Given>) -> Result<(), GuestError> {
        let record = self.read()?;
        self.write(&Record { given, ..record })
    }

    /// Whether that has been noted; also where that cannot be told.
    pub(crate) fn is_given(&self) -> bool {
        self.read().map_or(true, |record| record.given.is_some())
    }

    /// Notes that a VM that came is this host's.
    pub(crate) fn take_over(&self) -> Result<(), GuestError> {
        let record = self.read()?;
        let coming = record.awaited.as_ref().and_then(|awaited| awaited.left.clone());
        self.write(&Record { awaited: None, coming, ..record })
    }

    /// Notes that a VM that came is not this host's after all.
    pub(crate) fn wait_again(&self, awaited: &Awaited) -> Result<(), GuestError> {
        let record = self.read()?;
        self.write(&Record { awaited: Some(awaited.clone()), coming: None, ..record })
    }

    /// Notes that all of the memory of a VM that was given away is with the other host.
    pub(crate) fn gave_all(&self) -> Result<(), GuestError> {
        let record = self.read()?;
        let given = record.given.map(|given| Given { left: None, ..given });
        self.write(&Record { given, ..record })
    }

    /// Notes that all of the memory of a VM that came is here.
    pub(crate) fn has_all(&self) -> Result<(), GuestError> {
        let record = self.read()?;
        self.write(&Record { coming: None, ..record })
    }

    /// Whether its QEMU is there, be it that it does not answer just now. Waits for nobody: the lock on the host's budget is held over this.
    pub(crate) fn is_running(&self) -> bool {
        match self.read() {
            // Its monitor may be somebody else's just now.
            Ok(Record { origin: Origin::Adopted { .. }, pid: Some(pid), .. }) => {
                Pid::from_raw(pid as i32).is_some_and(|pid| test_kill_process(pid).is_ok())
            }
            _ => is_listening(&self.control()),
        }
    }

    /// Whether there is the VM, and its QEMU has not ended, as far as is known.
    pub(crate) fn is_alive(&self) -> bool {
        self.read().is_ok_and(|record| record.ended.is_none())
    }

    /// Whether that has been noted.
    pub(crate) fn is_ours(&self) -> Result<bool, GuestError> {
        Ok(self.read()?.awaited.is_none())
    }

    /// Notes an order to end the VM, for who sees its end.
    pub(super) fn order_end(&self, order: &str) {
        // Without it the order is not on record, but is carried out.
        let _ = fs::write(self.file("order"), order);
    }

    /// The last order to end the VM, if there was one.
    pub(super) fn ordered_end(&self) -> Option<String> {
        fs::read_to_string(self.file("order")).ok()
    }

    fn record(&self) -> PathBuf {
        self.file("record.json")
    }

    /// Makes them, for root only.
    pub(super) fn create(&self, record: &Record) -> Result<(), GuestError> {
        let directory = self.file("");
        let fail = || GuestError::io(format!("cannot make {}", directory.display()));
        if self.control().as_os_str().len() > LONGEST {
            let why = format!(
                "a socket's path has {LONGEST} bytes at most; choose a shorter name or --run-dir"
            );
            return Err(fail()(io::Error::other(why)));
        }
        fs::create_dir_all(self.run_dir.join("vms")).map_err(fail())?;
        match fs::DirBuilder::new().mode(0o700).create(&directory) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(GuestError::Exists(self.name.clone()));
            }
            made => made.map_err(fail())?,
        }
        self.write(record).inspect_err(|_| self.remove())
    }

    /// Writes the record anew.
    pub(super) fn write(&self, record: &Record) -> Result<(), GuestError> {
        let path = self.record();
        record::write(&path, record)
            .map_err(GuestError::io(format!("cannot write {}", path.display())))
    }

    pub(super) fn read(&self) -> Result<Record, GuestError> {
        let path = self.record();
        let read = record::read(&path)
            .map_err(GuestError::io(format!("cannot read {}", path.display())))?;
        read.ok_or_else(|| GuestError::Unknown(self.name.clone()))
    }

    /// Has this process be its keeper, for as long as it holds what it gets.
    pub(super) fn keep(&self) -> io::Result<File> {
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(self.file("lock"))?;
        lock.try_lock()?;
        Ok(lock)
    }

    /// Whether a keeper has it.
    pub(super) fn is_kept(&self) -> bool {
        let lock = File::open(self.file("lock"));
        lock.is_ok_and(|lock| matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }

    /// Removes them.
    pub(super) fn remove(&self) {
        // What is not there needs no removing.
        let _ = fs::remove_dir_all(self.file(""));
    }
}
