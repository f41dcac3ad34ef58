//! Requests to another process of this host over its control socket: one JSON object a line, each
//! way.
//!
//! A client connects, sends one request, and reads its answers ([`Answers`]). A request has the tag
//! `request`, an answer the tag `response`; the answer `failed` has the reason in `error`. A server
//! ([`ControlSocket`]) bounds a request's length, and the time of each wait for a client.
//!
//! The owner of the socket's directory removes the socket with its other files: only its lock tells
//! whether the file is still this process's.

mod call;
pub mod first_word;
mod server;

pub use call::{Answers, CallError, ControlCall, is_listening, next_answer};
pub use server::{Client, ControlSocket, Serving};
