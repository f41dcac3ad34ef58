//! The NBD server.
