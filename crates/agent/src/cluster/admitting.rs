//! How a signer answers a host that wants to join.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use aquifer_api::Problem;
use aquifer_api::message::{Join, Joined, MemberAddress};
use aquifer_api::status::Standing;
use aquifer_page::file::replace_durably;
use aquifer_page::{HostName, lock};
use aquifer_transport::tls::{Authority, same_key};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;

use super::token::Refusal;
use super::{ClusterDir, ClusterError};
use crate::peers::Peers;

/// This host's part in the admission of others.
#[derive(Clone, Debug)]
pub(crate) struct Admission {
    signer: Option<Signer>,
    host: HostName,
    own: SocketAddr,
    peers: Peers,
}

/// Admits hosts, one at a time.
#[derive(Clone, Debug)]
struct Signer(Arc<Mutex<ClusterDir>>);

fn refused(error: impl Into<String>, help: impl Into<String>) -> Problem {
    Problem { error: error.into(), help: Some(help.into()) }
}

fn failed(error: ClusterError) -> Problem {
    Problem { error: format!("this signer cannot admit hosts: {error}"), help: None }
}

impl Admission {
    /// Returns this host's part, which listens at `own`.
    pub(crate) fn new(dir: &ClusterDir, host: &HostName, own: SocketAddr, peers: Peers) -> Self {
        let signer = dir.admits().then(|| Signer(Arc::new(Mutex::new(dir.clone()))));
        Self { signer, host: host.clone(), own, peers }
    }

    /// Admits a host, or says where it can join.
    pub(crate) fn admit(&self, join: &Join) -> Result<Joined, Problem> {
        let peers = self.peers.status();
        let Some(signer) = &self.signer else {
            let signer = peers.iter().find(|peer| peer.admits);
            return Err(Problem {
                error: format!("{} cannot admit hosts to the cluster", self.host),
                help: signer.map(|signer| format!("join {} ({})", signer.address, signer.host)),
            });
        };
        let known = peers.into_iter().filter(|peer| peer.standing == Standing::Up);
        let known = known.filter_map(|peer| Some((peer.host, peer.address.parse().ok()?)));
        signer.admit(join, &self.host, known.chain([(self.host.clone(), self.own)]).collect())
    }
}

impl Admission {
    /// Notes that a host has left: its name is free.
    pub(crate) fn forget(&self, host: &HostName) -> Result<(), Problem> {
        let Some(Signer(dir)) = &self.signer else {
            let error = format!("{} does not admit hosts to the cluster", self.host);
            return Err(Problem { error, help: None });
        };
        lock(dir).free(host).map(drop).map_err(failed)
    }
}

impl Signer {
    /// Admits a host. The same host with the same key may ask again, if the answer was lost.
    /// `members` are all hosts of the cluster that this one knows, itself among them.
    fn admit(
        &self,
        join: &Join,
        own: &HostName,
        members: BTreeMap<HostName, SocketAddr>,
    ) -> Result<Joined, Problem> {
        let dir = lock(&self.0);
        let request = BASE64_STANDARD.decode(&join.request).map_err(|error| {
            refused(format!("the request for a certificate is malformed: {error}"), HELP_VERSION)
        })?;
        let address = join.address.to_string();
        let claimed = (join.host.as_str(), address.as_str(), request.as_slice());
        let checked = dir.check_proof(&join.token, claimed, &join.proof, SystemTime::now());
        checked.map_err(failed)?.map_err(|refusal| match refusal {
            Refusal::Unknown => refused(
                format!("{own} does not know this token"),
                "run 'aquifer cluster token' there, and use the command that it prints",
            ),
            Refusal::Ended => refused(
                "the token has ended",
                format!("run 'aquifer cluster token' on {own} for another"),
            ),
        })?;
        let issued = dir.issued(&join.host);
        let known = fs::read_to_string(&issued).ok();
        if join.host == *own || known.is_some_and(|known| !same_key(&known, &request)) {
            return Err(refused(
                format!("the name {} is taken by another host of this cluster", join.host),
                format!(
                    "choose another name with --host; or, if that host is gone for good, run \
                     'aquifer cluster forget {}' on {own}",
                    join.host
                ),
            ));
        }
        let authority = Authority::load(dir.path()).map_err(|error| failed(error.into()))?;
        let names = [join.address.ip().to_string()];
        let certificate =
            authority.sign(&request, &join.host, &names).map_err(|error| failed(error.into()))?;
        let kept = fs::create_dir_all(issued.parent().unwrap_or(dir.path()))
            .and_then(|()| replace_durably(&issued, certificate.as_bytes()));
        kept.map_err(|error| failed(ClusterError::File("write", issued, error)))?;
        let key = dir.key().map_err(failed)?;
        let key = key.ok_or_else(|| Problem {
            error: format!("{own} has no key of the cluster"),
            help: None,
        })?;
        tracing::info!(host = %join.host, address = %join.address, "admitted to the cluster");
        let member = |(host, address)| MemberAddress { host, address };
        Ok(Joined {
            certificate,
            authority: authority.certificate().map_err(|error| failed(error.into()))?,
            key: key.to_hex(),
            members: members.into_iter().map(member).collect(),
        })
    }
}

const HELP_VERSION: &str = "install the same version of aquifer on both hosts";

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use aquifer_transport::tls::{Identity, Request};

    use super::super::Token;
    use super::*;

    fn request(dir: &std::path::Path, host: &str, token: &Token) -> (Request, Join) {
        let name: HostName = host.parse().unwrap();
        let request = Request::prepare(&dir.join(host), &name).unwrap();
        let address = SocketAddr::from(([192, 0, 2, 1], 7070));
        let proof = token.proof(host, &address.to_string(), request.der());
        let der = BASE64_STANDARD.encode(request.der());
        (request, Join { token: token.id(), host: name, address, request: der, proof })
    }

    #[test]
    fn a_host_is_admitted_and_its_name_is_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let cluster = ClusterDir::new(dir.path().join("cluster"));
        cluster.create("test").unwrap();
        let token = cluster.new_token(Duration::from_secs(60)).unwrap();
        let signer = Signer(Arc::new(Mutex::new(cluster.clone())));
        let own = "a".parse().unwrap();
        let members = BTreeMap::from([("a".parse().unwrap(), ([192, 0, 2, 9], 7070).into())]);

        let (ours, join) = request(dir.path(), "b", &token);
        let first = signer.admit(&join, &own, members.clone()).unwrap();
        let again = signer.admit(&join, &own, members.clone()).unwrap();
        assert_eq!((first.members.len(), &first.key), (1, &again.key));
        ours.keep(&join.host, &again.certificate, &again.authority, token.authority()).unwrap();
        Identity::verify_own(&dir.path().join("b")).unwrap();

        // Another machine with the same name, and one with the signer's.
        let elsewhere = dir.path().join("elsewhere");
        for (host, what) in [("b", "the name b is taken"), ("a", "the name a is taken")] {
            let (_, join) = request(&elsewhere, host, &token);
            let refused = signer.admit(&join, &own, members.clone()).unwrap_err();
            assert!(refused.error.contains(what) && refused.help.is_some(), "{refused:?}");
        }
        // A token of another cluster, and a proof for another request.
        let (_, mut join) = request(&elsewhere, "c", &token);
        join.host = "d".parse().unwrap();
        let refused = signer.admit(&join, &own, members).unwrap_err();
        assert_eq!(refused.error, "a does not know this token");
        assert!(!cluster.path().join("hosts/d.pem").exists());
    }
}
