//! The pieces of `aquifer demo`: real processes with checked content, two hosts in network
//! namespaces, a live view, and the picture.

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
mod session;
pub mod sharing;
mod user;
mod wait;

use std::fs;
use std::path::{Path, PathBuf};

pub use guest::run as be_a_guest;
pub use session::Outcome;

/// Returns the directory, in RAM, of the pages that the demo with files in `dir` lends.
fn stores(dir: &Path) -> PathBuf {
    Path::new("/dev/shm/aquifer").join(dir.file_name().unwrap_or_default())
}

/// Removes the files of a demo, and the pages that its hosts and lenders have in RAM. Ignores
/// failures: either directory may be missing.
fn remove(dir: &Path) {
    let _ = fs::remove_dir_all(stores(dir));
    let _ = fs::remove_dir_all(dir);
}
