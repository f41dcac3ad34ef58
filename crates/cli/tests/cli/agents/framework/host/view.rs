//! The observable state of a host: its agent's status, and the kernel's view.

use std::fs;
use std::path::Path;

use aquifer_api::status::{Held, Lent, Role, Status, Volume};
use aquifer_blockdev::swap::swaps;

use super::{Host, lives};
use crate::agents::framework::wait_until;

impl Host {
    /// Returns the agent's status.
    #[track_caller]
    pub fn status(&self) -> Status {
        self.try_status().unwrap_or_else(|| panic!("the agent of {} does not answer", self.name()))
    }

    pub fn role(&self) -> Role {
        self.status().role
    }

    /// Returns the roles that it has had, in order.
    pub fn roles(&self) -> Vec<Role> {
        self.status().history.role_changes.iter().map(|change| change.to).collect()
    }

    /// Returns the one volume that it has borrowed.
    #[track_caller]
    pub fn volume(&self) -> Volume {
        let [volume] = self.status().loans.borrowed.try_into().unwrap();
        volume
    }

    /// Returns the part of its one volume that lies on `lender`.
    #[track_caller]
    pub fn held_of(&self, lender: &str) -> Option<Held> {
        self.volume().leases.into_iter().find(|held| held.lender.as_str() == lender)
    }

    /// Returns the one lease that it has granted.
    #[track_caller]
    pub fn lent(&self) -> Lent {
        let [lent] = self.status().loans.lent.try_into().unwrap();
        lent
    }

    /// Returns whether it neither borrows nor lends, and holds no pages of others.
    pub fn is_free(&self) -> bool {
        self.role() == Role::Neutral && self.lease_files().is_empty()
    }

    /// Returns whether the kernel has this volume's device, and not another's by the same name.
    pub fn is_attached(volume: &Volume) -> bool {
        let name = Path::new(&volume.device).file_name().unwrap();
        let device = Path::new("/sys/block").join(name);
        // loop and nbd show the device's mark in these files. ublk shows none, but its devices
        // exist only while they are in use.
        let marks =
            ["loop/backing_file", "backend"].map(|mark| fs::read_to_string(device.join(mark)));
        match marks.into_iter().flatten().next() {
            Some(mark) => mark.contains(&volume.volume.to_string()),
            None => volume.backend == "ublk" && device.exists(),
        }
    }

    /// Returns whether the kernel swaps to this volume.
    pub fn is_swap(volume: &Volume) -> bool {
        let device = Path::new(&volume.device);
        Self::is_attached(volume) && swaps().unwrap().iter().any(|swap| swap.path == device)
    }

    /// Waits until nothing is left of this volume: process, swap, device, files.
    #[track_caller]
    pub fn leaves_nothing(&self, volume: &Volume) {
        wait_until("the volume's process has ended", || !lives(volume.pid));
        wait_until("the volume's device is gone", || !Self::is_attached(volume));
        let files = fs::read_dir(self.state().join("volumes")).into_iter().flatten().flatten();
        let left: Vec<_> = files
            .map(|file| file.path())
            .filter(|path| path.extension().is_none_or(|e| e != "log"))
            .collect();
        assert!(left.is_empty(), "{left:?}");
    }

    /// Returns whether there are records of volumes here, served or not.
    pub fn has_volumes(&self) -> bool {
        let mut files = fs::read_dir(self.state().join("volumes")).into_iter().flatten().flatten();
        files.any(|file| file.path().extension().is_some_and(|extension| extension == "json"))
    }
}
