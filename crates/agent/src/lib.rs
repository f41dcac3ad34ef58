//! The daemon: monitor, leases, peers, HTTP.
