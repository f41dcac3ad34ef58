//! The group frames that guests map, as the kernel lists them in `/proc/PID/maps`.
//!
//! The list also shows frames of another group, which no guest may map.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use aquifer_cli::failure::{Failure, OrFail, Result};
use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_procfs::process::{self, Mapping, mappings};
use aquifer_region::process::{Files, GroupFiles, client};

use super::stage::{GROUPS, Stage, VMS, name};

/// The frames that the guests of a group map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Mapped {
    /// Bytes of their own group's frames.
    pub(super) own: Bytes,
    /// Pages of other groups' frames.
    pub(super) others: u64,
}

/// A file as `/proc/PID/maps` names it: device and inode.
type Id = (u64, u64);

/// Looks at all guests of each group.
pub(super) fn look(stage: &Stage) -> Result<Vec<Mapped>> {
    let what = || "looking at what guests have mapped";
    let mut frames = Vec::new();
    for group in GROUPS {
        let group = group.parse().or_fail(what)?;
        let file =
            fs::metadata(GroupFiles::new(&stage.regions(), &group).frames()).or_fail(what)?;
        frames.push((file.dev(), file.ino()));
    }
    if frames[0] == frames[1] {
        return Err(Failure::new(what(), "both groups have the same frames"));
    }
    let mut all = vec![Mapped::default(); GROUPS.len()];
    for vm in &VMS {
        let status =
            client::status(&Files::new(&stage.regions(), &name(vm.name)?)).or_fail(what)?;
        let group = GROUPS.iter().position(|group| *group == vm.group).unwrap_or_default();
        // The engine, too, may map frames of its region's group only.
        for process in status.processes.iter().chain([&status.pid]) {
            let maps = process::read(*process, "maps").or_fail(what)?;
            add(&mut all[group], &maps, &frames, group);
        }
    }
    Ok(all)
}

/// Adds the mappings of one process of this group.
fn add(mapped: &mut Mapped, maps: &str, frames: &[Id], group: usize) {
    for Mapping { addresses, file } in mappings(maps) {
        let length = addresses.end.saturating_sub(addresses.start);
        match frames.iter().position(|frames| *frames == file) {
            Some(own) if own == group => mapped.own += Bytes(length),
            Some(_) => mapped.others += length / PAGE_SIZE as u64,
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_of_another_groups_frames_is_seen() {
        let maps = "7f00-7f01 r--p 00000000 00:00 0 [vdso]\n\
                    7f0000001000-7f0000003000 rw-p 00005000 00:2b 17 /run/regions/@blue/frames\n\
                    7f0000003000-7f0000004000 rw-s 00000000 00:2b 16 /run/regions/blue-1\n\
                    7f0000004000-7f0000005000 rw-p 00001000 00:2b 18 /run/regions/@red/frames\n";
        let frames = [17, 18].map(|inode| (rustix::fs::makedev(0, 0x2b), inode));
        let mut mapped = Mapped::default();
        add(&mut mapped, maps, &frames, 0);
        assert_eq!(mapped, Mapped { own: Bytes::kib(8), others: 1 });
    }
}
