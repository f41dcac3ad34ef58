//! Tests of mutual TLS with plain rustls at the other end of a socket, and with strangers.

use std::io::{self, IoSlice, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_transport::channel::{Channel, Socket};
use aquifer_transport::tls::{self, TlsError, TlsStream};
use rustls::crypto::ring::cipher_suite::{
    TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256,
};
use rustls::{ClientConfig, ClientConnection, ServerConnection};

use crate::certificates::{Cluster, host, only_suite};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Sizes around the boundaries of headers, records, pages and buffers.
const SIZES: [usize; 12] =
    [1, 16, 28, 4096, 4124, 16_383, 16_384, 16_385, 131_072, 300_000, 1 << 20, (1 << 20) + 7];

fn pair() -> (Socket, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_read_timeout(Some(TIMEOUT)).unwrap();
    theirs.set_write_timeout(Some(TIMEOUT)).unwrap();
    (ours.into(), theirs)
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + seed * 7 + (at >> 8)) as u8).collect()
}

fn receive_exactly(stream: &mut TlsStream, len: usize) -> io::Result<Vec<u8>> {
    let mut data = vec![0; len];
    let mut at = 0;
    while at < len {
        match stream.recv(&mut data[at..])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            received => at += received,
        }
    }
    Ok(data)
}

/// Sends every size and receives it back from [`echo`].
fn exchange(stream: &mut TlsStream) {
    stream.set_deadline(Some(Instant::now() + TIMEOUT));
    for (seed, len) in SIZES.into_iter().enumerate() {
        let data = pattern(len, seed);
        let (head, rest) = data.split_at(len / 3);
        stream.send_all(&mut [IoSlice::new(head), IoSlice::new(&[]), IoSlice::new(rest)]).unwrap();
        assert!(receive_exactly(stream, len).unwrap() == data, "{len} bytes came back changed");
    }
}

/// Sends all data back until the peer's `close_notify`, with key updates in every third round.
fn echo<C, D>(mut connection: C, mut socket: UnixStream)
where
    C: std::ops::DerefMut<Target = rustls::ConnectionCommon<D>>,
    D: rustls::SideData,
{
    for (round, len) in SIZES.into_iter().enumerate() {
        let mut data = vec![0; len];
        rustls::Stream::new(&mut connection, &mut socket).read_exact(&mut data).unwrap();
        if round % 3 == 0 {
            connection.refresh_traffic_keys().unwrap();
        }
        rustls::Stream::new(&mut connection, &mut socket).write_all(&data).unwrap();
    }
    let end = rustls::Stream::new(&mut connection, &mut socket).read(&mut [0; 16]).unwrap();
    assert_eq!(end, 0, "the end is a farewell");
}

#[test]
fn our_server_understands_a_rustls_client_by_every_cipher() {
    let cluster = Cluster::new();
    for suite in
        [TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256]
    {
        let (ours, theirs) = pair();
        let config = only_suite(&cluster.dir("borrower"), suite);
        let client = thread::spawn(move || {
            echo(ClientConnection::new(config, "lender".try_into().unwrap()).unwrap(), theirs);
        });
        let (mut stream, peer) =
            tls::accept(ours, cluster.identity("lender").server_config(), TIMEOUT).unwrap();
        assert_eq!(peer, host("borrower"));
        stream.renew_key_after(5);
        exchange(&mut stream);
        drop(stream);
        client.join().unwrap();
    }
}

#[test]
fn a_client_of_ours_understands_a_rustls_server() {
    let cluster = Cluster::new();
    let (ours, theirs) = pair();
    let config = cluster.identity("lender").server_config();
    let server = thread::spawn(move || echo(ServerConnection::new(config).unwrap(), theirs));
    let config = cluster.identity("borrower").client_config();
    let mut stream = tls::connect(ours, config, &host("lender"), TIMEOUT).unwrap();
    stream.renew_key_after(5);
    exchange(&mut stream);
    drop(stream);
    server.join().unwrap();
}

#[test]
fn data_sent_with_the_end_of_the_handshake_is_not_lost() {
    let cluster = Cluster::new();
    let (ours, mut theirs) = pair();
    let config = cluster.identity("borrower").client_config();
    let data = pattern(40_000, 1);
    let sent = data.clone();
    let client = thread::spawn(move || {
        let mut connection = ClientConnection::new(config, "lender".try_into().unwrap()).unwrap();
        connection.writer().write_all(&sent).unwrap();
        while connection.wants_write() || connection.is_handshaking() {
            connection.complete_io(&mut theirs).unwrap();
        }
        theirs
    });
    let (mut stream, _) =
        tls::accept(ours, cluster.identity("lender").server_config(), TIMEOUT).unwrap();
    assert!(receive_exactly(&mut stream, data.len()).unwrap() == data);
    client.join().unwrap();
}

/// Connects two streams of ours.
fn streams(cluster: &Cluster) -> (TlsStream, TlsStream) {
    let (a, b) = pair();
    through(cluster, a, b.into())
}

fn through(cluster: &Cluster, client: Socket, server: Socket) -> (TlsStream, TlsStream) {
    let config = cluster.identity("lender").server_config();
    let server = thread::spawn(move || tls::accept(server, config, TIMEOUT).unwrap().0);
    let config = cluster.identity("borrower").client_config();
    let client = tls::connect(client, config, &host("lender"), TIMEOUT).unwrap();
    let server = server.join().unwrap();
    for stream in [&client, &server] {
        stream.set_deadline(Some(Instant::now() + TIMEOUT));
    }
    (client, server)
}

#[test]
fn data_that_try_send_took_arrives_even_by_a_full_socket() {
    let cluster = Cluster::new();
    let (mut client, mut server) = streams(&cluster);
    let data = pattern(16 << 20, 3);
    let mut at = 0;
    // Without a reader the socket takes some bytes, then none.
    loop {
        let taken = client.try_send(&[IoSlice::new(&data[at..])]).unwrap();
        at += taken;
        if taken == 0 {
            break;
        }
    }
    assert!(at > 0 && at < data.len(), "{at} bytes were taken without a reader");
    let reader = thread::spawn(move || {
        let received = receive_exactly(&mut server, at).unwrap();
        server.send_all(&mut [IoSlice::new(b"thanks")]).unwrap();
        (received, server)
    });
    // Waiting for the answer sends the rest.
    assert_eq!(receive_exactly(&mut client, 6).unwrap(), b"thanks");
    assert!(reader.join().unwrap().0 == data[..at]);
}

#[test]
fn a_farewell_is_the_end_and_a_cut_is_an_error() {
    let cluster = Cluster::new();
    let (client, mut server) = streams(&cluster);
    drop(client);
    assert_eq!(server.recv(&mut [0; 8]).unwrap(), 0);

    let (client, mut server) = streams(&cluster);
    client.socket().shutdown().unwrap();
    assert_eq!(server.recv(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
}

#[test]
fn a_time_out_while_nothing_comes_does_not_end_the_connection() {
    let cluster = Cluster::new();
    let (mut client, mut server) = streams(&cluster);
    client.set_deadline(Some(Instant::now()));
    assert_eq!(client.recv(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    client.set_deadline(None);
    server.send_all(&mut [IoSlice::new(b"late")]).unwrap();
    assert_eq!(receive_exactly(&mut client, 4).unwrap(), b"late");
}

#[test]
fn one_changed_bit_anywhere_in_a_record_is_an_error_and_no_data() {
    let cluster = Cluster::new();
    for at in [0, 1, 3, 4, 5, 20, 60] {
        let (client, near) = pair();
        let (server, far) = pair();
        let relay = thread::spawn(move || relay_and_damage(near, far, at));
        let (mut client, mut server) = through(&cluster, client, server);
        client.send_all(&mut [IoSlice::new(&pattern(50, at))]).unwrap();
        let error = server.recv(&mut [0; 100]).unwrap_err();
        let expected = [io::ErrorKind::InvalidData, io::ErrorKind::UnexpectedEof];
        assert!(expected.contains(&error.kind()), "byte {at} changed: {error}");
        assert!(server.recv(&mut [0; 100]).is_err(), "and it stays an error");
        drop((client, server));
        relay.join().unwrap();
    }
}

/// Relays the handshake, flips a bit in byte `at` of the next record, then closes.
fn relay_and_damage(mut near: UnixStream, mut far: UnixStream, at: usize) {
    let (mut near_back, mut far_back) = (near.try_clone().unwrap(), far.try_clone().unwrap());
    let back = thread::spawn(move || io::copy(&mut far_back, &mut near_back));
    let mut encrypted = 0;
    loop {
        let mut record = vec![0; 5];
        near.read_exact(&mut record).unwrap();
        let length = usize::from(u16::from_be_bytes([record[3], record[4]]));
        record.resize(5 + length, 0);
        near.read_exact(&mut record[5..]).unwrap();
        encrypted += usize::from(record[0] == 23);
        // The client's first encrypted record holds Certificate, CertificateVerify and Finished.
        let done = encrypted == 2;
        if done {
            record[at] ^= 1;
        }
        far.write_all(&record).unwrap();
        if done {
            break;
        }
    }
    far.shutdown(Shutdown::Write).unwrap();
    let _ = back.join();
}

/// Connects to a lender of `cluster` with this configuration; returns both errors.
///
/// The client's error comes from the handshake or from its first `recv`.
fn refusal(cluster: &Cluster, config: Arc<ClientConfig>) -> (String, TlsError) {
    let (ours, theirs) = pair();
    let server_config = cluster.identity("lender").server_config();
    let server =
        thread::spawn(move || tls::accept(theirs.into(), server_config, TIMEOUT).unwrap_err());
    let told = match tls::connect(ours, config, &host("lender"), TIMEOUT) {
        Err(error) => error.to_string(),
        Ok(mut stream) => {
            stream.set_deadline(Some(Instant::now() + TIMEOUT));
            // A real client does not know yet that the server refused it.
            let _ = stream.send_all(&mut [IoSlice::new(&[0; 64])]);
            stream.recv(&mut [0; 64]).unwrap_err().to_string()
        }
    };
    (told, server.join().unwrap())
}

#[test]
fn a_stranger_without_a_certificate_gets_nothing() {
    let cluster = Cluster::new();
    let (told, found) = refusal(&cluster, cluster.config_without_certificate());
    assert!(told.contains("CertificateRequired"), "{told}");
    assert!(matches!(found, TlsError::Handshake(_)), "{found}");
}

#[test]
fn a_host_of_another_cluster_gets_nothing_and_trusts_nothing() {
    let (cluster, other) = (Cluster::new(), Cluster::new());
    let (told, found) = refusal(&cluster, other.identity("borrower").client_config());
    assert!(told.contains("UnknownIssuer") || told.contains("BadSignature"), "{told}");
    assert!(matches!(found, TlsError::Handshake(_)), "{found}");

    // A client that trusts our authority but shows a certificate of another one.
    let (told, found) =
        refusal(&cluster, cluster.config_with_certificate_of(&other.dir("borrower")));
    assert!(told.contains("the peer ended the connection"), "{told}");
    assert!(matches!(found, TlsError::Handshake(_)), "{found}");
}

#[test]
fn a_host_is_not_taken_for_another_one() {
    let cluster = Cluster::new();
    cluster.issue("impostor", &["lender".to_owned(), "127.0.0.1".to_owned()]);
    for (name, why) in [
        ("borrower", "certificate"),
        ("impostor", "its certificate names host impostor, not lender"),
    ] {
        let (ours, theirs) = pair();
        let config = cluster.identity(name).server_config();
        let server = thread::spawn(move || tls::accept(theirs.into(), config, TIMEOUT));
        let config = cluster.identity("borrower").client_config();
        let error = tls::connect(ours, config, &host("lender"), TIMEOUT).unwrap_err().to_string();
        assert!(error.contains(why), "{name}: {error}");
        drop(server.join().unwrap());
    }
}

#[test]
fn a_silent_peer_or_one_without_tls_is_an_error_in_time() {
    let cluster = Cluster::new();
    let config = || cluster.identity("lender").server_config();
    let (ours, _silent) = pair();
    let error = tls::accept(ours, config(), Duration::from_millis(50)).unwrap_err();
    assert!(error.to_string().contains("took too long"), "{error}");

    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 100], &[22, 3, 1, 0, 4, 1, 2, 3, 4]] {
        let (ours, mut theirs) = pair();
        theirs.write_all(garbage).unwrap();
        theirs.shutdown(Shutdown::Write).unwrap();
        tls::accept(ours, config(), TIMEOUT).unwrap_err();
    }
}
