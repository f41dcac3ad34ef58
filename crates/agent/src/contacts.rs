//! Addresses of hosts that are no longer peers but still share leases with this host. The leases
//! can thus still return to their lenders.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use aquifer_page::HostName;

use crate::config::PeerConfig;

fn file(state: &Path) -> PathBuf {
    state.join("contacts.json")
}

/// Returns the hosts that the previous agent knew and that the configuration does not name.
pub(crate) fn former(state: &Path, peers: &[PeerConfig]) -> BTreeMap<HostName, String> {
    // Without a readable file, former peers must call this host themselves.
    let text = fs::read(file(state)).unwrap_or_default();
    let mut known: BTreeMap<HostName, String> = serde_json::from_slice(&text).unwrap_or_default();
    known.retain(|host, _| peers.iter().all(|peer| peer.name != *host));
    known
}

/// Saves, for the next agent, all hosts that may share leases with this one.
pub(crate) fn keep(
    state: &Path,
    peers: &[PeerConfig],
    former: &BTreeMap<HostName, String>,
) -> io::Result<()> {
    let mut known = former.clone();
    known.extend(peers.iter().map(|peer| (peer.name.clone(), peer.address.clone())));
    DirBuilder::new().recursive(true).mode(0o700).create(state)?;
    let (file, new) = (file(state), state.join("contacts.json.new"));
    fs::write(&new, serde_json::to_vec(&known)?)?;
    fs::rename(new, file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(name: &str, address: &str) -> PeerConfig {
        PeerConfig { name: name.parse().unwrap(), address: address.to_owned() }
    }

    #[test]
    fn a_host_that_leaves_the_configuration_is_still_known() {
        let dir = tempfile::tempdir().unwrap();
        let both = [peer("b", "b:1"), peer("c", "c:1")];
        assert!(former(dir.path(), &both).is_empty(), "there was no agent before");
        keep(dir.path(), &both, &BTreeMap::new()).unwrap();
        let one = &both[..1];
        let left = former(dir.path(), one);
        assert_eq!(left, BTreeMap::from([("c".parse().unwrap(), "c:1".to_owned())]));
        keep(dir.path(), one, &left).unwrap();
        assert_eq!(former(dir.path(), one), left);
        assert!(former(dir.path(), &both).is_empty());
    }
}
