//! Cache of host addresses by name, because a process on the swap path must not ask a name server.

use std::cell::Cell;
use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::{LazyLock, PoisonError, RwLock};

type Known = HashMap<(String, u16), Vec<SocketAddr>>;

static KNOWN: LazyLock<RwLock<Known>> = LazyLock::new(RwLock::default);

thread_local! {
    static FROM_MEMORY: Cell<bool> = const { Cell::new(false) };
}

/// Runs `call` so that it connects to hosts by the addresses that this process found last. A host
/// without cached addresses is looked up all the same.
pub fn from_memory<T>(call: impl FnOnce() -> T) -> T {
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            FROM_MEMORY.set(self.0);
        }
    }
    let _before = Before(FROM_MEMORY.replace(true));
    call()
}

/// Returns the addresses of a host, in the order in which to try them.
pub(crate) fn addresses(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let key = (host.to_owned(), port);
    if FROM_MEMORY.get()
        && let Some(known) = KNOWN.read().unwrap_or_else(PoisonError::into_inner).get(&key)
    {
        return Ok(known.clone());
    }
    let found: Vec<_> = (host, port).to_socket_addrs()?.collect();
    KNOWN.write().unwrap_or_else(PoisonError::into_inner).insert(key, found.clone());
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_host_is_not_looked_up_again_from_memory() {
        let found = addresses("localhost", 4711).unwrap();
        assert!(found.iter().all(|address| address.ip().is_loopback()));
        // A name server would not give this address for localhost.
        let moved: Vec<SocketAddr> = vec!["192.0.2.1:4711".parse().unwrap()];
        KNOWN.write().unwrap().insert(("localhost".to_owned(), 4711), moved.clone());
        assert_eq!(from_memory(|| addresses("localhost", 4711)).unwrap(), moved);
        assert!(
            from_memory(|| addresses("127.0.0.1", 4712)).is_ok(),
            "one that is not known is looked up"
        );
        assert_eq!(addresses("localhost", 4711).unwrap(), found, "and so is one that may be");
        assert_eq!(from_memory(|| addresses("localhost", 4711)).unwrap(), found);
    }
}
