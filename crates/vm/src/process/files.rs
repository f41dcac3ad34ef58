//! The paths of a VM's files, and its record.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use aquifer_control_socket::is_listening;
use aquifer_page::{Group, RegionName};
use aquifer_region::process::{Files as RegionFiles, GroupFiles, record};
use rustix::process::{Pid, test_kill_process};

use super::message::{Origin, Record};
use crate::error::VmError;
use crate::memory::{self, Limits};
use crate::migrate::{HandedOver, Incoming};
use crate::{Backing, VmSpec};

/// The files of a VM, `RUN_DIR/vms/NAME/…`, and of its region beside them.
#[derive(Clone, Debug)]
pub struct Files {
    run_dir: PathBuf,
    name: RegionName,
}

/// The longest path of a unix socket, in bytes (unix(7)).
const LONGEST: usize = 107;

/// The end of the name of a directory that is being removed.
const GONE: &str = ".gone";

/// The most attempts to remove a directory that other processes remove at the same time.
const REMOVALS: usize = 16;

impl Files {
    /// Names the files of the VM `name` under `run_dir`.
    pub fn new(run_dir: &Path, name: &RegionName) -> Self {
        Self { run_dir: run_dir.to_owned(), name: name.clone() }
    }

    /// Lists the files of all VMs there.
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

    /// Removes what processes that were killed left of VMs that they [removed](Self::remove).
    pub(super) fn clear_removed(run_dir: &Path) -> io::Result<()> {
        let entries = match fs::read_dir(run_dir.join("vms")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            // No VM's name begins with a dot.
            let is_gone = |name: &str| name.starts_with('.') && name.ends_with(GONE);
            if entry.file_name().to_str().is_some_and(is_gone) {
                // The process that removes it may be alive after all.
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        Ok(())
    }

    /// Returns the VM's name.
    pub fn name(&self) -> &RegionName {
        &self.name
    }

    pub(crate) fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    /// Returns the files that the VMs of a group share.
    pub(super) fn group(&self, group: &Group) -> GroupFiles {
        GroupFiles::new(&self.run_dir.join("regions"), group)
    }

    /// Returns the files of the region that is the VM's memory.
    pub fn region(&self) -> RegionFiles {
        RegionFiles::new(&self.run_dir.join("regions"), &self.name)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.run_dir.join("vms").join(self.name.as_str()).join(name)
    }

    /// Returns the monitor for other programs.
    pub fn qmp(&self) -> PathBuf {
        self.file("qmp")
    }

    /// Returns the monitor for short queries of this program.
    pub fn control(&self) -> PathBuf {
        self.file("control")
    }

    /// Returns the monitor for migrations and resizes, which may hold it for long.
    pub(crate) fn mover(&self) -> PathBuf {
        self.file("mover")
    }

    /// Returns the port to the agent in the guest.
    pub fn agent(&self) -> PathBuf {
        self.file("agent")
    }

    /// Returns the file of the times that the stages of resizes took.
    pub(crate) fn times(&self) -> PathBuf {
        self.file("times.json")
    }

    /// Reads the limits of the VM's memory; [`memory::UNLIMITED`] if none are set.
    pub(crate) fn limits(&self) -> Result<Limits, VmError> {
        let path = self.file("limits.json");
        let read =
            record::read(&path).map_err(VmError::io(format!("cannot read {}", path.display())))?;
        Ok(read.unwrap_or(memory::UNLIMITED))
    }

    /// Writes the limits of the VM's memory.
    pub(super) fn set_limits(&self, limits: &Limits) -> Result<(), VmError> {
        let path = self.file("limits.json");
        record::write(&path, limits)
            .map_err(VmError::io(format!("cannot write {}", path.display())))
    }

    /// Returns the definition from which the VM was started, if there is one.
    pub(crate) fn definition(&self) -> Result<Option<PathBuf>, VmError> {
        Ok(self.read()?.definition)
    }

    /// Returns QEMU's process, once it runs.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.read().ok()?.pid
    }

    /// Returns whether another program started the VM.
    pub(crate) fn is_adopted(&self) -> bool {
        self.read().is_ok_and(|record| matches!(record.origin, Origin::Adopted { .. }))
    }

    /// Returns whether the VM's memory is in huge pages, which the kernel set aside before.
    pub(crate) fn has_huge_pages(&self) -> bool {
        let is_huge = |vm: &VmSpec| matches!(vm.backing, Backing::Local { huge: Some(_) });
        self.read().is_ok_and(|record| matches!(record.origin, Origin::Started(vm) if is_huge(&vm)))
    }

    /// Returns whether the VM may hold memory: it runs, is about to, or its record cannot be read.
    pub(crate) fn has_memory(&self) -> bool {
        match self.read() {
            Ok(record) if record.ended.is_some() => false,
            Ok(record) => record.pid.is_none() || self.is_running() || self.is_supervised(),
            Err(VmError::Unknown(_)) => false,
            Err(_) => true,
        }
    }

    /// Returns the processor model that stands for all features of the host, if the VM uses that
    /// model.
    pub(crate) fn whole_cpu(&self) -> Result<Option<&'static str>, VmError> {
        match self.read()?.origin {
            Origin::Started(spec) => Ok(spec.processors.whole_cpu()),
            Origin::Adopted { .. } => Ok(None),
        }
    }

    /// Returns the socket of the guest's serial port.
    pub fn serial(&self) -> PathBuf {
        self.file("serial")
    }

    /// Returns the log of the guest's serial port.
    pub fn console(&self) -> PathBuf {
        self.file("console.log")
    }

    /// Returns the log of QEMU and of the supervisor.
    pub fn log(&self) -> PathBuf {
        self.file("log")
    }

    /// Returns the socket through which QEMU saves or loads device state in a migration.
    pub(crate) fn devices(&self) -> PathBuf {
        self.file("devices")
    }

    /// Returns the mark of a later attempt to move the VM here.
    pub(super) fn superseded(&self) -> PathBuf {
        self.file("superseded")
    }

    /// Returns whether the source has begun another attempt to move the VM here.
    pub(crate) fn is_superseded(&self) -> bool {
        self.superseded().exists()
    }

    /// Returns the supervisor's control socket.
    pub(super) fn supervisor(&self) -> PathBuf {
        // Supervisors of earlier releases listen here as well.
        self.file("keeper")
    }

    /// Notes whether the VM belongs to another host.
    pub(crate) fn set_handed_over(&self, handed_over: Option<HandedOver>) -> Result<(), VmError> {
        let record = self.read()?;
        self.write(&Record { handed_over, ..record })
    }

    /// Returns whether the VM belongs to another host; true also if the record cannot be read.
    pub(crate) fn is_handed_over(&self) -> bool {
        self.read().map_or(true, |record| record.handed_over.is_some())
    }

    /// Notes that an arrived VM belongs to this host.
    pub(crate) fn take_over(&self) -> Result<(), VmError> {
        let record = self.read()?;
        let awaiting_source =
            record.incoming.as_ref().and_then(|incoming| incoming.left_at_source.clone());
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let arrived_ms = Some(now.as_millis() as u64);
        self.write(&Record { incoming: None, awaiting_source, arrived_ms, ..record })
    }

    /// Notes that an arrived VM does not belong to this host after all.
    pub(crate) fn wait_again(&self, incoming: &Incoming) -> Result<(), VmError> {
        let record = self.read()?;
        self.write(&Record { incoming: Some(incoming.clone()), awaiting_source: None, ..record })
    }

    /// Notes that the other host has all of the memory of a VM that was handed over.
    pub(crate) fn note_all_sent(&self) -> Result<(), VmError> {
        let record = self.read()?;
        let handed_over = record
            .handed_over
            .map(|handed_over| HandedOver { left_at_source: None, ..handed_over });
        self.write(&Record { handed_over, ..record })
    }

    /// Notes that all of the memory of an arrived VM is here.
    pub(crate) fn note_all_arrived(&self) -> Result<(), VmError> {
        let record = self.read()?;
        self.write(&Record { awaiting_source: None, ..record })
    }

    /// Returns whether QEMU exists, even if it does not answer now. The check must not block: the
    /// caller may hold the lock of the host's budget.
    pub(crate) fn is_running(&self) -> bool {
        match self.read() {
            // Another client may hold the monitor, so that connecting would block.
            Ok(Record { origin: Origin::Adopted { .. }, pid: Some(pid), .. }) => {
                Pid::from_raw(pid as i32).is_some_and(|pid| test_kill_process(pid).is_ok())
            }
            _ => is_listening(&self.control()),
        }
    }

    /// Returns whether the VM exists and no end of its QEMU is on record.
    pub(crate) fn is_alive(&self) -> bool {
        self.read().is_ok_and(|record| record.ended.is_none())
    }

    /// Returns whether the VM may arrive from another host, and is not this host's yet.
    pub fn arrives(&self) -> bool {
        self.read().is_ok_and(|record| record.incoming.is_some())
    }

    /// Returns whether this host has handed the VM over to another one.
    pub fn leaves(&self) -> bool {
        self.read().is_ok_and(|record| record.handed_over.is_some())
    }

    /// Returns whether the record says that the VM is this host's.
    pub fn is_settled(&self) -> bool {
        self.read().is_ok_and(|record| record.incoming.is_none() && record.handed_over.is_none())
    }

    /// Returns whether an arriving VM belongs to this host.
    pub(crate) fn is_ours(&self) -> Result<bool, VmError> {
        Ok(self.read()?.incoming.is_none())
    }

    /// Notes an order to end the VM, so that its end can be attributed.
    pub(super) fn order_end(&self, order: &str) {
        // A failure only loses the attribution; the order is carried out.
        let _ = fs::write(self.file("order"), order);
    }

    /// Returns the last order to end the VM, if there was one.
    pub(super) fn ordered_end(&self) -> Option<String> {
        fs::read_to_string(self.file("order")).ok()
    }

    fn record(&self) -> PathBuf {
        self.file("record.json")
    }

    /// Creates the VM's directory, for root only, and its record.
    pub(super) fn create(&self, record: &Record) -> Result<(), VmError> {
        let directory = self.file("");
        let fail = || VmError::io(format!("cannot make {}", directory.display()));
        if self.control().as_os_str().len() > LONGEST {
            let why = format!(
                "a socket's path has at most {LONGEST} bytes: choose a shorter name or --run-dir"
            );
            return Err(fail()(io::Error::other(why)));
        }
        fs::create_dir_all(self.run_dir.join("vms")).map_err(fail())?;
        match fs::DirBuilder::new().mode(0o700).create(&directory) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(VmError::Exists(self.name.clone()));
            }
            made => made.map_err(fail())?,
        }
        self.write(record).inspect_err(|_| self.remove())
    }

    /// Creates the record of a VM with a definition, without a QEMU.
    #[cfg(test)]
    pub(crate) fn make_record(
        &self,
        spec: &VmSpec,
        definition: &Path,
        incoming: Option<Incoming>,
    ) -> Result<(), VmError> {
        self.create(&Record::of(spec, Some(definition), incoming))
    }

    /// Replaces the record.
    pub(super) fn write(&self, record: &Record) -> Result<(), VmError> {
        let path = self.record();
        record::write(&path, record)
            .map_err(VmError::io(format!("cannot write {}", path.display())))
    }

    pub(super) fn read(&self) -> Result<Record, VmError> {
        let path = self.record();
        let read =
            record::read(&path).map_err(VmError::io(format!("cannot read {}", path.display())))?;
        read.ok_or_else(|| VmError::Unknown(self.name.clone()))
    }

    /// Makes this process the VM's supervisor until it drops the returned lock.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if the VM has a supervisor; [`io::ErrorKind::NotFound`] if
    /// there is no such VM.
    pub(super) fn lock_supervision(&self) -> io::Result<File> {
        let path = self.file("lock");
        let lock =
            OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path)?;
        lock.try_lock()?;
        // The former holder may have removed the VM with the file, between the two calls.
        let (locked, named) = (lock.metadata()?, fs::metadata(&path)?);
        if (locked.dev(), locked.ino()) != (named.dev(), named.ino()) {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the VM was removed meanwhile"));
        }
        Ok(lock)
    }

    /// Returns whether a supervisor holds the VM.
    pub(super) fn is_supervised(&self) -> bool {
        let lock = File::open(self.file("lock"));
        lock.is_ok_and(|lock| matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }

    /// Returns whether QEMU runs without a supervisor, although the VM is this host's, or part of
    /// its memory or a lock of its disks is still here.
    pub fn lacks_supervisor(&self) -> bool {
        let may_run = self.read().is_ok_and(|record| {
            let needs_it = match &record.handed_over {
                None => true,
                // Its disk cache must unlock the disks.
                Some(it) => it.left_at_source.is_some() || record.origin.has_cached_disks(),
            };
            record.pid.is_some() && record.incoming.is_none() && needs_it
        });
        may_run && !self.is_supervised() && self.is_running()
    }

    /// Removes the VM's directory at once: if its files went one after another, a supervisor
    /// could create a new lock beside the record of a VM that goes.
    pub(super) fn remove(&self) {
        let gone = self.run_dir.join("vms").join(format!(".{}{GONE}", self.name));
        let is_in_the_way = |error: io::Error| error.kind() == io::ErrorKind::DirectoryNotEmpty;
        for _ in 0..REMOVALS {
            // A process that was killed may have left it.
            let _ = fs::remove_dir_all(&gone);
            // A missing directory is no error.
            if !fs::rename(self.file(""), &gone).is_err_and(is_in_the_way) {
                break;
            }
        }
        let _ = fs::remove_dir_all(&gone);
    }
}
