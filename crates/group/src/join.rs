//! Whether a region may join a group on a host, and what all that the group has there may take.

use std::path::Path;

use aquifer_page::{Bytes, RegionName};
use aquifer_region::RegionError;
use aquifer_region::process::client as regions;

use crate::agreement::{Agreement, GroupError};

impl Agreement {
    /// Whether a region of `size` may join the group on the host whose regions are in `directory`. The group's caches there are within what it
    /// agrees on then.
    ///
    /// # Errors
    /// [`GroupError::NotMember`], [`GroupError::Full`], or that regions cannot be looked at.
    pub fn join(&self, directory: &Path, name: &RegionName, size: Bytes) -> Result<(), GroupError> {
        let all = regions::list(directory)?;
        let others = all.iter().filter(|files| files.name() != name);
        let there = others.filter_map(|files| regions::record(files).ok());
        let there = there.filter(|spec| spec.group == self.name).map(|spec| (spec.name, spec.size));
        self.admit(name, size, &there.collect::<Vec<_>>())?;
        Ok(self.limit_caches(directory)?)
    }

    /// Has the caches of its regions in `directory` be within what the group agrees on.
    ///
    /// # Errors
    /// If they cannot be told.
    pub fn limit_caches(&self, directory: &Path) -> Result<(), RegionError> {
        let is = regions::limits(directory)?.groups.get(&self.name).copied();
        if is != self.limits.cache {
            regions::limit(directory, Some(&self.name), self.limits.cache)?;
        }
        Ok(())
    }
}
