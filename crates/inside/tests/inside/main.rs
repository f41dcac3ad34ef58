//! The agent for guests as a program.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod command;
