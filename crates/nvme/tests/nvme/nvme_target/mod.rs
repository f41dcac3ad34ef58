//! The NVMe/TCP target, against hosts made by hand: valid and broken ones.

mod admin;
mod allocations;
mod authentication;
mod broken;
mod connect;
mod events;
pub mod harness;
pub mod host;
mod introduction;
mod io;
mod limits;
