//! The identity of this host towards NVMe lenders.

use aquifer_nvme::proto::Nqn;
use serde::{Deserialize, Serialize};

use super::super::{NvmeError, Root};

/// The identity that this host presents: its NQN, which lenders allow, and a host ID.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostIdentity {
    /// The host NQN.
    pub nqn: Nqn,
    /// The host ID, a UUID as text. The kernel rejects one ID with two NQNs and one NQN with two
    /// IDs.
    pub id: String,
}

const UUID_NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:";

impl HostIdentity {
    /// Returns the identity with the NQN `nqn`, or else this host's own identity.
    ///
    /// This host's NQN stands in `/etc/nvme/hostnqn`, as for nvme-cli. Without that file it is
    /// derived from `/etc/machine-id`, or else from the boot ID. The host ID is the UUID in the
    /// NQN, or else `/etc/nvme/hostid`, or else derived likewise.
    ///
    /// # Errors
    /// Fails if `/etc/nvme/hostnqn` is used and holds no NQN, or if no source yields an ID.
    pub fn find(root: &Root, nqn: Option<Nqn>) -> Result<Self, NvmeError> {
        let own = root.read("/etc/nvme/hostnqn").filter(|text| !text.is_empty());
        let nqn = match (nqn, own) {
            (Some(nqn), _) => nqn,
            (None, Some(own)) => own
                .parse()
                .map_err(|error| NvmeError::new(format!("/etc/nvme/hostnqn: {error}")))?,
            (None, None) => {
                let id = of_machine(root)
                    .ok_or_else(|| NvmeError::new("this host has no machine ID and no boot ID"));
                let id = id.map_err(|error| {
                    error.help("give --host-nqn, or write /etc/nvme/hostnqn ('nvme gen-hostnqn')")
                })?;
                let nqn = format!("{UUID_NQN}{id}").parse();
                return Ok(Self {
                    nqn: nqn.map_err(|error| NvmeError::new(format!("{error}")))?,
                    id,
                });
            }
        };
        let of_file = || root.read("/etc/nvme/hostid").filter(|text| is_uuid(text));
        let of_name =
            nqn.as_str().strip_prefix(UUID_NQN).filter(|text| is_uuid(text)).map(str::to_owned);
        let id = of_name.or_else(of_file).or_else(|| of_machine(root));
        let id = id.ok_or_else(|| {
            NvmeError::new(format!("no host ID is known for {nqn}"))
                .help("write a UUID to /etc/nvme/hostid, or use an NQN that contains one")
        })?;
        Ok(Self { nqn, id })
    }
}

/// Returns a UUID of this host: the machine ID, or else the boot ID.
fn of_machine(root: &Root) -> Option<String> {
    let machine = || root.read("/etc/machine-id");
    let boot = || root.read("/proc/sys/kernel/random/boot_id");
    let digits = machine()
        .filter(|text| text.len() == 32)
        .or_else(boot)?
        .replace('-', "")
        .to_ascii_lowercase();
    let uuid =
        |d: &str| format!("{}-{}-{}-{}-{}", &d[..8], &d[8..12], &d[12..16], &d[16..20], &d[20..]);
    (digits.len() == 32 && digits.is_ascii()).then(|| uuid(&digits)).filter(|uuid| is_uuid(uuid))
}

fn is_uuid(text: &str) -> bool {
    let hyphen = |index| matches!(index, 8 | 13 | 18 | 23);
    let good = |(index, byte): (usize, u8)| {
        if hyphen(index) { byte == b'-' } else { byte.is_ascii_hexdigit() }
    };
    text.len() == 36 && text.bytes().enumerate().all(good)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const ID: &str = "01234567-89ab-cdef-0011-223344556677";

    fn with(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        for (path, text) in files {
            let path = root.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        (dir, root)
    }

    #[test]
    fn a_host_is_called_as_nvme_cli_calls_it_or_by_its_machine_id() {
        let (_dir, root) = with(&[("/etc/machine-id", "0123456789abcdef0011223344556677\n")]);
        let host = HostIdentity::find(&root, None).unwrap();
        assert_eq!((host.nqn.as_str(), host.id.as_str()), (format!("{UUID_NQN}{ID}").as_str(), ID));

        let (_dir, root) =
            with(&[("/etc/nvme/hostnqn", "nqn.2014-08.org.example:h\n"), ("/etc/nvme/hostid", ID)]);
        let host = HostIdentity::find(&root, None).unwrap();
        assert_eq!((host.nqn.as_str(), host.id.as_str()), ("nqn.2014-08.org.example:h", ID));
    }

    #[test]
    fn a_host_without_a_unique_identity_learns_the_remedy() {
        let (_dir, root) = with(&[]);
        assert!(HostIdentity::find(&root, None).unwrap_err().help.unwrap().contains("--host-nqn"));
        let name = "nqn.2014-08.org.example:h".parse().unwrap();
        assert!(
            HostIdentity::find(&root, Some(name)).unwrap_err().help.unwrap().contains("hostid")
        );
        let name = format!("{UUID_NQN}{ID}").parse().unwrap();
        assert_eq!(HostIdentity::find(&root, Some(name)).unwrap().id, ID);
    }
}
