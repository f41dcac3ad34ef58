//! Tests of sockets, of TLS and of a cluster's certificates.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod certificates;
mod channel;
mod common;
mod tls;
mod tls_authority;
mod tls_revocation;
