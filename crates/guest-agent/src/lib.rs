//! The software in a guest that virtio-mem resizes, and the messages between guest and host.
//!
//! [`agent`] is a daemon that reports the guest's figures to the host, and asks for more memory
//! when that is urgent. The daemon also brings added memory online, and measures the stages of a
//! resize in the guest's kernel. By [`request()`] and [`give_back()`] an application asks for
//! memory before it needs it. [`message`] holds the protocol of agent and host. The guest's part
//! follows \[Bielski18\], section III.

pub mod agent;
mod application_message;
mod client;
mod figures;
pub mod message;
mod trace;
mod urgency;

pub use application_message::{Granted, GuestStatus, SOCKET};
pub use client::{Client, RequestError, give_back, request};
pub use figures::Online;
