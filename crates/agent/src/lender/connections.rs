//! Detection of TCP connections to a port that the kernel serves, from proc(5).

use std::fs;

/// The kernel's `TCP_ESTABLISHED`, as `/proc/net/tcp` writes it.
const ESTABLISHED: &str = "01";

/// Tells whether `port` of this host has a TCP connection; also true if the kernel shows no table.
pub(super) fn any(port: u16) -> bool {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(fs::read_to_string);
    // A kernel without IPv6 has only the first table.
    tables.iter().all(Result::is_err) || tables.iter().flatten().any(|table| has(table, port))
}

fn has(table: &str, port: u16) -> bool {
    let suffix = format!(":{port:04X}");
    table.lines().any(|line| {
        let mut words = line.split_whitespace();
        // Fields: number, local address, remote address, state.
        let (local, state) = (words.nth(1), words.nth(1));
        local.is_some_and(|local| local.ends_with(&suffix)) && state == Some(ESTABLISHED)
    })
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_connection_is_seen_for_as_long_as_there_is_one() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        assert!(!any(at.port()), "a listener is not a connection");
        let client = TcpStream::connect(at).unwrap();
        let server = listener.accept().unwrap();
        assert!(any(at.port()));
        drop((client, server));
        let gone = (0..500).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            !any(at.port())
        });
        assert!(gone, "what has ended is no connection");
    }
}
