//! Memory blocks: the unit in which the kernel adds, onlines and removes memory (kernel's
//! admin-guide/mm/memory-hotplug.rst).

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use aquifer_page::Bytes;

use super::parse;
use crate::message::BlockSizes;

/// The zone in which added memory goes online.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Online {
    /// For movable pages only, so that the guest can give the memory back.
    #[default]
    Movable,
    /// For any pages. The guest cannot give back blocks that hold the kernel's own pages.
    Kernel,
    /// None: another program brings memory online.
    Leave,
}

impl Online {
    /// Returns the kernel's words for it, the preferred one first.
    fn words(self) -> &'static [&'static str] {
        match self {
            Self::Movable => &["online_movable", "online"],
            Self::Kernel => &["online_kernel", "online"],
            Self::Leave => &[],
        }
    }
}

/// The guest's memory blocks.
#[derive(Debug)]
pub(crate) struct Blocks {
    dir: PathBuf,
}

impl Blocks {
    /// Takes the memory blocks under the root directory `root`.
    pub(crate) fn new(root: &Path) -> Self {
        Self { dir: root.join("sys/devices/system/memory") }
    }

    /// Makes the kernel bring added memory online as `online` says, unless it is set to
    /// `online_kernel` or `online_movable` already. By default the kernel leaves added memory
    /// offline, or puts it in a zone for unmovable pages, from which it cannot be removed again.
    ///
    /// # Errors
    /// If the kernel refuses; a kernel without memory hot-plug is no error.
    pub(crate) fn keep_online(&self, online: Online) -> io::Result<()> {
        let file = self.dir.join("auto_online_blocks");
        match (fs::read_to_string(&file), online.words().first()) {
            (Ok(now), Some(word)) if matches!(now.trim(), "offline" | "online") => {
                fs::write(file, word)
            }
            _ => Ok(()),
        }
    }

    /// Brings every offline block online; returns how many failed.
    pub(crate) fn bring_online(&self, online: Online) -> usize {
        if online == Online::Leave {
            return 0;
        }
        let states = self.states().filter(|state| !is_online(state));
        states
            .filter(|state| {
                // The zone may be full, or the kernel may not know the word.
                !online.words().iter().any(|word| fs::write(state, word).is_ok()) && state.exists()
            })
            .count()
    }

    /// Counts the blocks.
    pub(crate) fn count(&self) -> BlockSizes {
        let block = fs::read_to_string(self.dir.join("block_size_bytes")).ok();
        let block = block.and_then(|text| parse::block_size(&text)).unwrap_or_default();
        let (mut online, mut all) = (0, 0);
        for state in self.states() {
            all += 1;
            online += u64::from(is_online(&state));
        }
        let bytes = |blocks: u64| Bytes(block.0.saturating_mul(blocks));
        BlockSizes { online: bytes(online), offline: bytes(all - online), block }
    }

    /// Returns the directory's link count, which changes when blocks are added or removed.
    pub(crate) fn links(&self) -> u64 {
        fs::metadata(&self.dir).map_or(0, |dir| dir.nlink())
    }

    fn states(&self) -> impl Iterator<Item = PathBuf> {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        entries
            .filter(|entry| {
                let name = entry.file_name();
                let number = name.to_str().and_then(|name| name.strip_prefix("memory"));
                number.is_some_and(|number| number.parse::<u64>().is_ok())
            })
            .map(|entry| entry.path().join("state"))
    }
}

fn is_online(state: &Path) -> bool {
    fs::read_to_string(state).is_ok_and(|text| text.trim() == "online")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    fn machine(states: &[&str]) -> (tempfile::TempDir, Blocks) {
        let root = tempfile::tempdir().unwrap();
        let blocks = Blocks::new(root.path());
        fs::create_dir_all(blocks.dir.join("power")).unwrap();
        fs::write(blocks.dir.join("block_size_bytes"), "8000000\n").unwrap();
        fs::write(blocks.dir.join("auto_online_blocks"), "offline\n").unwrap();
        for (index, state) in states.iter().enumerate() {
            let block = blocks.dir.join(format!("memory{index}"));
            fs::create_dir(&block).unwrap();
            fs::write(block.join("state"), format!("{state}\n")).unwrap();
        }
        (root, blocks)
    }

    #[test]
    fn blocks_are_counted_by_their_state() {
        let (_root, blocks) = machine(&["online", "offline", "going-offline", "online", "online"]);
        let expected = BlockSizes {
            online: Bytes::mib(384),
            offline: Bytes::mib(256),
            block: Bytes::mib(128),
        };
        assert_eq!(blocks.count(), expected);
    }

    #[test]
    fn a_machine_without_memory_hotplug_has_no_blocks() {
        let root = tempfile::tempdir().unwrap();
        let blocks = Blocks::new(root.path());
        assert_eq!(blocks.count(), BlockSizes::default());
        assert_eq!(blocks.bring_online(Online::Movable), 0);
        blocks.keep_online(Online::Movable).unwrap();
    }

    #[test]
    fn only_offline_blocks_are_brought_online_and_in_the_given_mode() {
        let (_root, blocks) = machine(&["online", "offline"]);
        assert_eq!(blocks.bring_online(Online::Leave), 0);
        let state = |block: &str| fs::read_to_string(blocks.dir.join(block).join("state")).unwrap();
        assert_eq!(state("memory1"), "offline\n");
        assert_eq!(blocks.bring_online(Online::Movable), 0);
        assert_eq!(
            (state("memory0").as_str(), state("memory1").as_str()),
            ("online\n", "online_movable")
        );
    }

    #[test]
    fn added_blocks_go_online_only_if_no_other_policy_is_set() {
        let (_root, blocks) = machine(&[]);
        let file = blocks.dir.join("auto_online_blocks");
        blocks.keep_online(Online::Leave).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "offline\n");
        blocks.keep_online(Online::Movable).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "online_movable");
        blocks.keep_online(Online::Kernel).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "online_movable");
    }
}
