//! The admission of a region to a group, and the limit of the group's caches on a host.

use std::path::Path;

use aquifer_page::{Bytes, Group, RegionName};
use aquifer_region::RegionError;
use aquifer_region::process::client as regions;

use crate::agreement::{Agreement, GroupError};

/// Returns whether regions in `directory` are, or may be, in the group: one whose record cannot be
/// read counts.
///
/// # Errors
/// If the regions cannot be listed.
pub(crate) fn has_regions(directory: &Path, group: &Group) -> Result<bool, RegionError> {
    let all = regions::list(directory)?;
    Ok(all.iter().any(|files| regions::record(files).map_or(true, |spec| spec.group == *group)))
}

impl Agreement {
    /// Checks whether a region of `size` may join the group on the host whose regions are in
    /// `directory`. Also sets the limit of the group's caches there.
    ///
    /// # Errors
    /// [`GroupError::NotMember`] or [`GroupError::Full`] if it may not; [`GroupError::Regions`] if
    /// the regions cannot be read or limited.
    pub fn join(&self, directory: &Path, name: &RegionName, size: Bytes) -> Result<(), GroupError> {
        let all = regions::list(directory)?;
        let others = all.iter().filter(|files| files.name() != name);
        let there = others.filter_map(|files| regions::record(files).ok());
        let there = there.filter(|spec| spec.group == self.name).map(|spec| (spec.name, spec.size));
        self.admit(name, size, &there.collect::<Vec<_>>())?;
        Ok(self.limit_caches(directory)?)
    }

    /// Limits the caches of the group's regions in `directory` as the group agrees.
    ///
    /// # Errors
    /// If the limits cannot be read or set.
    pub fn limit_caches(&self, directory: &Path) -> Result<(), RegionError> {
        let is = regions::limits(directory)?.groups.get(&self.name).copied();
        if is != self.limits.cache {
            regions::limit(directory, Some(&self.name), self.limits.cache)?;
        }
        Ok(())
    }
}
