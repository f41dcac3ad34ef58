//! A cluster's authority and hosts in a temporary directory.

// Each test uses only a part of this module.
#![allow(dead_code, clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_page::HostName;
use aquifer_transport::tls::{
    Authority, CA_CERTIFICATE, HOST_CERTIFICATE, HOST_KEY, Identity, TlsError,
};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ConfigBuilder, RootCertStore, SupportedCipherSuite, client, version};

pub struct Cluster {
    dir: tempfile::TempDir,
    authority: Authority,
}

pub fn host(name: &str) -> HostName {
    name.parse().unwrap()
}

impl Cluster {
    /// Creates a cluster with the hosts `lender` and `borrower`.
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(&dir.path().join("ca"), "test").unwrap();
        let cluster = Self { dir, authority };
        cluster.issue("lender", &[]);
        cluster.issue("borrower", &[]);
        cluster
    }

    pub fn dir(&self, host: &str) -> PathBuf {
        self.dir.path().join(host)
    }

    pub fn try_issue(&self, name: &str, names: &[String]) -> Result<(), TlsError> {
        self.authority.issue(&self.dir(name), &host(name), names, false)
    }

    pub fn issue(&self, name: &str, names: &[String]) {
        self.try_issue(name, names).unwrap();
    }

    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    pub fn identity(&self, host: &str) -> Identity {
        Identity::load(&self.dir(host)).unwrap()
    }

    pub fn config_without_certificate(&self) -> Arc<ClientConfig> {
        let mut config = builder(&self.dir("borrower"), None).with_no_client_auth();
        config.enable_secret_extraction = true;
        Arc::new(config)
    }

    /// Returns a configuration that trusts this cluster's authority and shows the certificate in
    /// `dir`.
    pub fn config_with_certificate_of(&self, dir: &Path) -> Arc<ClientConfig> {
        with_certificate(builder(&self.dir("borrower"), None), dir)
    }
}

/// Returns the client configuration of the host in `dir`, limited to one cipher suite.
pub fn only_suite(dir: &Path, suite: SupportedCipherSuite) -> Arc<ClientConfig> {
    with_certificate(builder(dir, Some(suite)), dir)
}

type Builder = ConfigBuilder<ClientConfig, client::WantsClientCert>;

fn builder(dir: &Path, suite: Option<SupportedCipherSuite>) -> Builder {
    let mut provider = default_provider();
    provider.cipher_suites = suite.map_or(provider.cipher_suites, |suite| vec![suite]);
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(dir.join(CA_CERTIFICATE)).unwrap()).unwrap();
    ClientConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(&[&version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
}

fn with_certificate(builder: Builder, dir: &Path) -> Arc<ClientConfig> {
    let chain = vec![CertificateDer::from_pem_file(dir.join(HOST_CERTIFICATE)).unwrap()];
    let key = PrivateKeyDer::from_pem_file(dir.join(HOST_KEY)).unwrap();
    let mut config = builder.with_client_auth_cert(chain, key).unwrap();
    config.enable_secret_extraction = true;
    Arc::new(config)
}
