//! What runs in a guest whose memory is resized by virtio-mem, and what it and its host say to each other.
//!
//! [`agent`] is a daemon that reports the guest's figures to its host, asks for more memory when that is urgent, brings online what is
//! added, and measures what a resize takes in the guest's kernel. By [`request()`] and [`give_back()`] an application asks for memory ahead
//! of its need. [`message`] is what agent and host say. The guest is that of Bielski et al. 2018, section III.

pub mod agent;
mod asking;
mod client;
mod figures;
pub mod message;
mod trace;
mod urgency;

pub use asking::{Granted, SOCKET, Status};
pub use client::{Client, RequestError, give_back, request};
pub use figures::Online;
