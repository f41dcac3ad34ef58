//! The pieces of `aquifer demo`: real processes that hold checked content, two hosts in network namespaces, what is
//! shown while it runs and the picture that remains.

mod begun;
pub mod churn;
pub mod content;
pub mod groups;
mod guest;
pub mod live;
pub mod load;
pub mod loader;
pub mod machine;
pub mod migrate;
pub mod netns;
pub mod picture;
pub mod process;
pub mod region;
pub mod resize;
pub mod sharing;
mod user;
mod wait;

use std::fs;
use std::path::{Path, PathBuf};

pub use begun::Outcome;
pub use guest::run as be_a_guest;

/// Where the pages of the hosts are of a demo that has its files in `dir`: in RAM.
fn stores(dir: &Path) -> PathBuf {
    Path::new("/dev/shm/aquifer").join(dir.file_name().unwrap_or_default())
}

/// Removes the files of a demo, and what its hosts and lenders have kept in RAM. What is not there needs no removing.
fn remove(dir: &Path) {
    let _ = fs::remove_dir_all(stores(dir));
    let _ = fs::remove_dir_all(dir);
}
