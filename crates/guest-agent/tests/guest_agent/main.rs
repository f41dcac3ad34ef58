//! Tests of the agent's program.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod command;
