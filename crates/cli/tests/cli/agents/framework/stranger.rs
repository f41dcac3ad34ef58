//! Callers that are no agents: without a certificate, with another cluster's, or with a host's own.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;

use aquifer_api::client::{CallError, Client};
use aquifer_nbd::client::{Connection, NbdError, Target};
use aquifer_nbd::proto::{option, reply};
use aquifer_page::LeaseId;
use aquifer_transport::Address;
use aquifer_transport::tls;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::{Host, STEP_TIMEOUT, block_on};

/// A caller that knows the hosts' addresses and has no certificate.
pub struct Stranger {
    tls: Arc<ClientConfig>,
}

impl Stranger {
    /// Trusts the hosts with a certificate of the authority in this file.
    pub fn new(authority: &Path) -> Self {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(authority).unwrap()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(default_provider()));
        let config = config.with_safe_default_protocol_versions().unwrap();
        Self { tls: Arc::new(config.with_root_certificates(roots).with_no_client_auth()) }
    }

    /// Sends `words` to `to` under TLS; returns the answer until the connection closes.
    pub fn say_under_tls(&self, to: SocketAddr, host: &Host, words: &[u8]) -> Vec<u8> {
        self.say_on(connect(to), host, words)
    }

    /// Sends `words` under TLS on an open connection; returns the answer until the connection
    /// closes.
    pub fn say_on(&self, stream: TcpStream, host: &Host, words: &[u8]) -> Vec<u8> {
        until_closed(&mut self.begin(stream, host, words))
    }

    /// Sends `words` under TLS on an open connection, and keeps it open.
    pub fn begin(
        &self,
        stream: TcpStream,
        host: &Host,
        words: &[u8],
    ) -> StreamOwned<ClientConnection, TcpStream> {
        let name = ServerName::try_from(host.name()).unwrap();
        let connection = ClientConnection::new(self.tls.clone(), name).unwrap();
        let mut stream = StreamOwned::new(connection, stream);
        // The server may close the connection during the write.
        let _ = stream.write_all(words).and_then(|()| stream.flush());
        stream
    }
}

/// Connects, with [`STEP_TIMEOUT`] as the timeout of reads and writes.
pub fn connect(to: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(STEP_TIMEOUT)).unwrap();
    stream.set_write_timeout(Some(STEP_TIMEOUT)).unwrap();
    stream
}

/// Sends `words` to `to` in the clear; returns the answer until the connection closes.
pub fn say(to: SocketAddr, words: &[u8]) -> Vec<u8> {
    let mut stream = connect(to);
    let _ = stream.write_all(words);
    until_closed(&mut stream)
}

/// Reads until the other side closes the connection, in whichever way.
///
/// # Panics
/// If it does not close within [`STEP_TIMEOUT`].
pub fn until_closed(stream: &mut impl Read) -> Vec<u8> {
    let mut heard = Vec::new();
    if let Err(error) = stream.read_to_end(&mut heard) {
        let waited = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
        assert!(
            !waited,
            "the connection is still open; received {:?}",
            String::from_utf8_lossy(&heard)
        );
    }
    heard
}

/// A certificate with its key.
pub struct Identity(tls::Identity);

impl Identity {
    /// Loads the one in `dir`, as `aquifer cluster init` makes it.
    pub fn load(dir: &Path) -> Self {
        Self(tls::Identity::load(dir).unwrap())
    }

    /// Combines the certificate in `dir` with the authority in `trusting`. The client then accepts
    /// the server, and only the server may refuse.
    pub fn trusting(dir: &Path, trusting: &Path) -> Self {
        let mixed = tempfile::tempdir().unwrap();
        for (from, file) in [(trusting, "ca.pem"), (dir, "host.pem"), (dir, "host.key")] {
            fs::copy(from.join(file), mixed.path().join(file)).unwrap();
        }
        Self::load(mixed.path())
    }

    /// Returns a client of a host's API.
    pub fn agent(&self, host: &Host) -> Client {
        Client::peer(&host.api().to_string(), &host.host_name(), self.0.client_config())
    }

    /// Calls the API of a host: `GET`.
    pub fn get(&self, host: &Host, path: &str) -> Result<serde_json::Value, CallError> {
        block_on(self.agent(host).get(path))
    }

    /// Calls the API of a host: `POST`.
    pub fn post(
        &self,
        host: &Host,
        path: &str,
        body: &impl serde::Serialize,
    ) -> Result<serde_json::Value, CallError> {
        block_on(self.agent(host).post(path, body))
    }

    /// Opens a lease at its lender.
    pub fn open(&self, lender: &Host, lease: LeaseId) -> Result<Connection, NbdError> {
        let address =
            Address::Tcp { host: lender.pages().ip().to_string(), port: lender.pages().port() };
        let tls = Some((self.0.client(), lender.host_name()));
        let target = Arc::new(Target { address, export: lease.to_string(), tls });
        Connection::connect(target, STEP_TIMEOUT)
    }

    /// Returns the exports that a lender lists for this identity.
    pub fn exports(&self, lender: &Host) -> Vec<String> {
        let name = ServerName::try_from(lender.name()).unwrap();
        let connection = ClientConnection::new(self.0.client_config(), name).unwrap();
        let mut stream = StreamOwned::new(connection, start_tls(lender.pages()));
        send_option(&mut stream, option::LIST, b"");
        let mut names = Vec::new();
        loop {
            match answer(&mut stream) {
                (reply::SERVER, text) => names.push(String::from_utf8(text[4..].to_vec()).unwrap()),
                (kind, _) => {
                    assert_eq!(kind, reply::ACK);
                    return names;
                }
            }
        }
    }
}

/// Connects to a page port and starts TLS (NBD_OPT_STARTTLS).
pub fn start_tls(to: SocketAddr) -> TcpStream {
    let mut stream = connect(to);
    assert_eq!(ask(greeted(&mut stream), option::STARTTLS, b""), reply::ACK);
    stream
}

/// Reads the greeting of an NBD server (fixed newstyle) and answers it.
pub fn greeted<S: Read + Write>(stream: &mut S) -> &mut S {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
    stream.write_all(&3u32.to_be_bytes()).unwrap();
    stream
}

/// Sends an NBD option and returns the type of the reply; drops the reply's data.
pub fn ask<S: Read + Write>(stream: &mut S, option: u32, payload: &[u8]) -> u32 {
    send_option(stream, option, payload);
    answer(stream).0
}

/// Reads one reply to an NBD option: its type and its data.
fn answer(stream: &mut impl Read) -> (u32, Vec<u8>) {
    let mut header = [0; 20];
    stream.read_exact(&mut header).unwrap();
    let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
    let mut text = vec![0; word(16) as usize];
    stream.read_exact(&mut text).unwrap();
    (word(12), text)
}

/// Sends an NBD option and does not wait for the reply.
pub fn send_option(stream: &mut impl Write, option: u32, payload: &[u8]) {
    let length = u32::try_from(payload.len()).unwrap();
    let message = [b"IHAVEOPT", &option.to_be_bytes()[..], &length.to_be_bytes(), payload].concat();
    stream.write_all(&message).unwrap();
}
