//! The pieces of `aquifer demo`: real processes that hold checked content, two hosts in network namespaces, what is
//! shown while it runs and the picture that remains.

pub mod churn;
pub mod content;
pub mod live;
pub mod load;
pub mod loader;
pub mod migrate;
pub mod netns;
pub mod picture;
pub mod process;
pub mod region;
pub mod sharing;

use std::path::{Path, PathBuf};

/// Where the pages of the hosts are of a demo that has its files in `dir`: in RAM.
fn stores(dir: &Path) -> PathBuf {
    Path::new("/dev/shm/aquifer").join(dir.file_name().unwrap_or_default())
}
