//! The processes of a region: its engine, and one that starts another engine when that dies.
//!
//! [`client::create`] starts them from any program, by running it again under a hidden subcommand ([`SUBCOMMAND`]) that calls
//! [`run()`]. They outlive their starter. The files of region `NAME`, all on a tmpfs of their own, which is there while there are regions:
//!
//! | `NAME` | what programs map: the pages that are here |
//! |---|---|
//! | `.NAME/table`, `.NAME/places` | what is known of each page (locked while an engine lives), and where the extents of the volume are |
//! | `.NAME/sharers` | which pages are frames of the group |
//! | `.NAME/mapped` | which programs have it mapped |
//! | `.NAME/record.json` | what it was made with |
//! | `.NAME/kept` | locked while a keeper lives |
//! | `.NAME/foreign` | is there while the region is another host's: what it takes of its lenders is not this one's to give back |
//! | `.NAME/programs`, `.NAME/control` | the sockets, for programs that map it and for who asks about it |
//! | `.NAME/log` | what the engines have to say |
//!
//! `@GROUP/frames` has what the regions of a group share, once. It is written by who looks for equal pages ([`View`], [`client::share`]), and goes with
//! the group's last region. `@GROUP/cache.*` are the sockets of a cache of the group's disks, and go with that.
//!
//! Beside that tmpfs, `DIRECTORY.limits` says which limits the caches of several regions share, and what each has of them.

pub mod client;
mod control;
mod control_call;
mod file_lock;
mod files;
pub mod first_word;
mod hand_over;
mod message;
mod pages;
mod quota;
pub mod record;
mod regions;
mod run;
mod shim;
mod view;

pub use control_call::{ControlCall, is_listening, next_answer};
pub use file_lock::lock_file;
pub use files::{Files, GroupFiles, RegionSpec};
pub use message::{Bucket, Latency, Status};
pub use pages::{Extent, PageState, Pages};
pub use quota::{Limits, Quota};
pub use run::{SUBCOMMAND, run};
pub use shim::shim;
pub use view::View;
