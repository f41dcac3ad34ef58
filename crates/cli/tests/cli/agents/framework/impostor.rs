//! A program in the place of a host's agent, with the host's certificate and without its manners.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::thread;
use std::time::Duration;

use aquifer_transport::tls;
use rustls::{ServerConnection, StreamOwned};

use super::Host;

/// A program that takes calls at a host's address, and gives all of them the same answer.
pub struct Impostor;

impl Impostor {
    /// Answers in the place of `host`, whose agent does not run, with these bytes.
    pub fn answer(host: &Host, answer: &[u8]) {
        Self::serve(host, &host.tls(), Some(answer.to_vec()));
    }

    /// Takes calls and answers none.
    pub fn be_silent(host: &Host) {
        Self::serve(host, &host.tls(), None);
    }

    /// Answers with the certificate in `tls`, which is another host's.
    pub fn answer_as(host: &Host, tls: &Path) {
        Self::serve(host, tls, Some(Vec::new()));
    }

    fn serve(host: &Host, tls: &Path, answer: Option<Vec<u8>>) {
        let listener = TcpListener::bind(host.api()).unwrap();
        let config = tls::Identity::load(tls).unwrap().server_config();
        // The threads end with the test program: the address is this test's own.
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (config, answer) = (config.clone(), answer.clone());
                thread::spawn(move || {
                    let connection = ServerConnection::new(config).unwrap();
                    let mut stream = StreamOwned::new(connection, stream);
                    let mut heard = Vec::new();
                    let mut byte = [0];
                    while !heard.ends_with(b"\r\n\r\n") && matches!(stream.read(&mut byte), Ok(1)) {
                        heard.push(byte[0]);
                    }
                    match answer {
                        // The caller may be gone.
                        Some(answer) => _ = stream.write_all(&answer).and_then(|()| stream.flush()),
                        None => thread::sleep(Duration::from_secs(3600)),
                    }
                });
            }
        });
    }
}
