//! The addresses of leases, and the means to reach them.

use std::fs;
use std::path::PathBuf;

use aquifer_nbd::Uri;
use aquifer_nbd::client as nbd;
use aquifer_nvme::NvmeUri;
use aquifer_nvme::auth::{SecretError, Secrets};
use aquifer_nvme::initiator as nvme;
use aquifer_nvme::proto::Nqn;
use aquifer_page::{Bytes, HostName, LeaseId};
use aquifer_transport::Address;
use aquifer_transport::tls::Identity;
use serde::{Deserialize, Serialize};

use crate::claim::Claim;
use crate::encryption::Encryption;
use crate::error::VolumeError;
use crate::holder::Source;

/// A lease for a volume: its lender, and the address of its pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Record", into = "Record")]
pub struct LeaseTarget {
    /// The lease.
    pub lease: LeaseId,
    /// The lender's host name. Over TLS, the server must prove this name.
    pub lender: HostName,
    /// The address of the lender's server.
    pub address: Address,
    /// The protocol that the server speaks.
    pub protocol: Protocol,
    /// The usable size of the lease, of which the volume uses whole extents.
    pub capacity: Bytes,
    /// The encryption of its pages; `None` if they are not encrypted.
    pub encryption: Option<Encryption>,
    /// The claim that the lender is told. Without one, the lender does not know the owner.
    pub claim: Option<Claim>,
}

/// The protocol by which a lease is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// NBD.
    Nbd {
        /// The name of the lease's export.
        export: String,
        /// Whether to use mutual TLS.
        secure: bool,
    },
    /// NVMe/TCP.
    Nvme(NvmeAccess),
}

/// A subsystem with the lease as its first namespace, and this host's access to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvmeAccess {
    /// The NQN of the subsystem.
    pub subsystem: Nqn,
    /// The NQN of this host.
    pub host: Nqn,
    /// The file with the secrets of DH-HMAC-CHAP (NVMe Base 2.0, section 8.13.5). Its first line
    /// authenticates this host. The controller must authenticate itself if there is a second line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secrets: Option<PathBuf>,
}

/// The recorded form of a lease: `export` and `secure` for NBD, `nvme` for NVMe/TCP.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    lease: LeaseId,
    lender: HostName,
    address: Address,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    export: Option<String>,
    capacity: Bytes,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    secure: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nvme: Option<NvmeAccess>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    encryption: Option<Encryption>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    claim: Option<Claim>,
}

impl From<LeaseTarget> for Record {
    fn from(target: LeaseTarget) -> Self {
        let LeaseTarget { lease, lender, address, protocol, capacity, encryption, claim } = target;
        let (export, secure, nvme) = match protocol {
            Protocol::Nbd { export, secure } => (Some(export), Some(secure), None),
            Protocol::Nvme(access) => (None, None, Some(access)),
        };
        Self { lease, lender, address, export, capacity, secure, nvme, encryption, claim }
    }
}

impl TryFrom<Record> for LeaseTarget {
    type Error = &'static str;

    fn try_from(record: Record) -> Result<Self, Self::Error> {
        let Record { lease, lender, address, export, capacity, secure, nvme, encryption, claim } =
            record;
        let protocol = match (export, secure, nvme) {
            (Some(export), Some(secure), None) => Protocol::Nbd { export, secure },
            (None, None, Some(access)) => Protocol::Nvme(access),
            _ => return Err("a lease needs either `export` and `secure`, or `nvme`"),
        };
        Ok(Self { lease, lender, address, protocol, capacity, encryption, claim })
    }
}

impl LeaseTarget {
    /// Returns the lease's location as a URI.
    pub fn uri(&self) -> String {
        let address = self.address.clone();
        match &self.protocol {
            Protocol::Nbd { export, secure } => {
                Uri { secure: *secure, address, export: export.clone() }.to_string()
            }
            Protocol::Nvme(access) => {
                NvmeUri { address, subsystem: access.subsystem.clone() }.to_string()
            }
        }
    }

    /// Adds encryption under a new key, unless the address is a unix socket.
    ///
    /// A loopback address proves nothing: a tunnel to another host may listen there.
    #[must_use]
    pub fn encrypted(self) -> Self {
        let is_here = matches!(self.address, Address::Unix(_));
        Self { encryption: (!is_here).then(Encryption::random), ..self }
    }

    /// Returns whether the other target is the same place, so that two volumes would ruin each
    /// other's pages.
    pub fn is_same_place(&self, other: &Self) -> bool {
        self.address == other.address
            && match (&self.protocol, &other.protocol) {
                (Protocol::Nbd { export: one, .. }, Protocol::Nbd { export: two, .. }) => {
                    one == two
                }
                (Protocol::Nvme(one), Protocol::Nvme(two)) => one.subsystem == two.subsystem,
                _ => false,
            }
    }

    /// Returns whether the other target is this lease, told again. The claim of a recorded lease
    /// may know more than that of the request which added it.
    pub fn is_same_lease(&self, other: &Self) -> bool {
        self.lease == other.lease
            && self.is_same_place(other)
            && (self.capacity, &self.encryption) == (other.capacity, &other.encryption)
    }

    /// Returns the source of connections to the lease, with this host's credentials and the claim.
    ///
    /// # Errors
    /// When the lease demands TLS and this host has no certificate, or when a secret cannot be
    /// read.
    pub fn source(&self, identity: Option<&Identity>) -> Result<Source, VolumeError> {
        let source = self.way(identity)?;
        Ok(match &self.claim {
            Some(claim) => source.claimed(claim.clone(), false),
            None => source,
        })
    }

    fn way(&self, identity: Option<&Identity>) -> Result<Source, VolumeError> {
        let address = self.address.clone();
        match &self.protocol {
            Protocol::Nbd { export, secure } => {
                let tls = match (identity, secure) {
                    (_, false) => None,
                    (Some(identity), true) => Some((identity.client(), self.lender.clone())),
                    (None, true) => {
                        let why = "it requires TLS, but this host has no certificate: run 'aquifer \
                                   cluster join'";
                        let (lease, lender) = (self.lease, self.lender.to_string());
                        return Err(VolumeError::Unusable { lease, lender, why: why.to_owned() });
                    }
                };
                Ok(Source::new(nbd::Target { address, export: export.clone(), tls }))
            }
            Protocol::Nvme(access) => {
                let target =
                    nvme::Target::new(address, access.subsystem.clone(), access.host.clone());
                let target = nvme::Target { secrets: self.secrets(access)?, ..target };
                Ok(Source::new(nvme::ByteSession::new(target)))
            }
        }
    }

    fn secrets(&self, access: &NvmeAccess) -> Result<Option<Secrets>, VolumeError> {
        let Some(path) = &access.secrets else { return Ok(None) };
        let bad = |why: String| VolumeError::Secret {
            lease: self.lease,
            lender: self.lender.to_string(),
            path: path.clone(),
            why,
        };
        let text = fs::read_to_string(path).map_err(|error| bad(error.to_string()))?;
        text.parse().map(Some).map_err(|error: SecretError| bad(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use aquifer_page::Incarnation;

    use super::*;

    const NBD: &str = concat!(
        r#"{"lease":"00000000000000000000000000000001","lender":"b","address":"10.0.0.2:7001","#,
        r#""export":"x","capacity":67108864,"secure":true}"#
    );

    #[test]
    fn old_nbd_records_are_read_and_written_as_before() {
        let target: LeaseTarget = serde_json::from_str(NBD).unwrap();
        assert_eq!(target.protocol, Protocol::Nbd { export: "x".to_owned(), secure: true });
        assert_eq!(serde_json::to_string(&target).unwrap(), NBD);
        assert_eq!(target.uri(), "nbds://10.0.0.2:7001/x");
    }

    #[test]
    fn only_pages_for_a_unix_socket_leave_unencrypted() {
        let target: LeaseTarget = serde_json::from_str(NBD).unwrap();
        let is_encrypted = |address: &str| {
            let address = address.parse().unwrap();
            LeaseTarget { address, ..target.clone() }.encrypted().encryption.is_some()
        };
        assert!(!is_encrypted("unix:/run/nbd"));
        for address in ["10.0.0.2:10809", "127.0.0.1:10809", "[::1]:10809", "localhost:10809"] {
            assert!(is_encrypted(address), "{address} may lead to another host");
        }
    }

    #[test]
    fn a_claim_survives_being_recorded() {
        let target: LeaseTarget = serde_json::from_str(NBD).unwrap();
        let claim = Claim {
            incarnation: Some(Incarnation(7)),
            ..Claim::new("region web".to_owned(), true)
        };
        let target = LeaseTarget { claim: Some(claim), ..target };
        let text = serde_json::to_string(&target).unwrap();
        assert_eq!(serde_json::from_str::<LeaseTarget>(&text).unwrap(), target);
    }

    #[test]
    fn a_lease_by_nvme_survives_being_recorded() {
        let nbd: LeaseTarget = serde_json::from_str(NBD).unwrap();
        let access = NvmeAccess {
            subsystem: "nqn.2014-08.org.example:s".parse().unwrap(),
            host: "nqn.2014-08.org.example:h".parse().unwrap(),
            secrets: Some("/etc/aquifer/secret".into()),
        };
        let target = LeaseTarget { protocol: Protocol::Nvme(access), ..nbd.clone() };
        let text = serde_json::to_string(&target).unwrap();
        assert_eq!(serde_json::from_str::<LeaseTarget>(&text).unwrap(), target);
        assert_eq!(target.uri(), "nvme+tcp://10.0.0.2:7001/nqn.2014-08.org.example:s");
        assert!(target.is_same_place(&target) && !target.is_same_place(&nbd));
        let both = text.replace("\"nvme\":", "\"export\":\"x\",\"secure\":false,\"nvme\":");
        assert!(serde_json::from_str::<LeaseTarget>(&both).is_err());
    }
}
