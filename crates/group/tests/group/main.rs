//! Tests of a group's balancer. The tests need root.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod balance;
