//! A volume as the memory of programs.
//!
//! A region is a file on a tmpfs, as large as the memory of a program. Only some pages are in the
//! file: its local cache. The rest is in a [`Volume`](aquifer_volume::Volume), with lenders. A
//! program maps the file and hands the mapping's userfaultfd to the region's [`Engine`] (crate
//! `region-client`). The engine brings a page when the program touches it, and evicts victims when
//! the cache is full.

mod counters;
mod effect;
mod engine;
mod error;
mod extent_map;
mod file;
mod folios;
mod frames;
pub mod handover;
mod named;
pub mod policy;
mod prefetch;
pub mod process;
mod program;
mod sys;
mod table;

pub use counters::{Counts, Times};
pub use engine::{
    Engine, EngineConfig, Incoming, LinkSpec, Merged, Paging, Proposal, Scheme, Usage,
};
pub use error::RegionError;
pub use policy::PolicyKind;
pub use prefetch::PrefetchKind;
pub use program::mappings_left;

use aquifer_page::lock;
