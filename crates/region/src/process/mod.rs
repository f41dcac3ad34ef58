//! The processes of a region: an engine, and a supervisor that starts another engine when the first
//! dies.
//!
//! [`client::create`] starts them from any program. It runs the program again under a hidden
//! subcommand ([`SUBCOMMAND`]) that calls [`run()`]. They outlive their starter.
//!
//! The files of region `NAME` are on a tmpfs of their own, which exists while there are regions:
//!
//! | `NAME` | the file that programs map, with the pages of the local cache |
//! |---|---|
//! | `.NAME/table` | the state of each page; locked while an engine lives |
//! | `.NAME/extent_map` | the places of the volume's extents |
//! | `.NAME/tags-LEASE` | the tags of the pages that a lease, or the spill file, holds |
//! | `.NAME/sharers` | the pages that are frames of the group |
//! | `.NAME/mapped` | the programs that map the region |
//! | `.NAME/record.json` | the region's specification |
//! | `.NAME/kept` | locked while a supervisor lives |
//! | `.NAME/foreign` | exists while the region, and so its lenders' memory, is another host's |
//! | `.NAME/programs` | the socket for programs that map the region |
//! | `.NAME/control` | the socket for requests of operators and agents |
//! | `.NAME/log` | the log of the engines |
//!
//! `@GROUP/frames` holds the shared pages of a group's regions, once each. The scanner writes it
//! ([`View`], [`client::share`]). It goes with the group's last region. `@GROUP/cache.*` are the
//! sockets of the group's disk cache, and go with that.
//!
//! Beside the tmpfs, `DIRECTORY.limits` holds the limits that caches of several regions share, and
//! each region's quota.

pub mod client;
mod control;
mod file_lock;
mod files;
mod hand_over;
mod leases;
mod message;
mod pages;
mod preload_library;
mod quota;
pub mod record;
mod regions;
mod run;
mod spill;
mod view;

pub use file_lock::lock_file;
pub use files::{Files, GroupFiles, RegionSpec};
pub use message::{Bucket, FetchTimes, Latency, RegionStatus};
pub use pages::{Extent, PageState, Pages};
pub use preload_library::preload_library;
pub use quota::{Limits, Quota};
pub use run::{SUBCOMMAND, run};
pub use spill::{disk_copies_in, remove_old_spill_files};
pub use view::View;
