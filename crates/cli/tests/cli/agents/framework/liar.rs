//! A host of the cluster that takes part in the gossip, and whose agent says what a test wants.

use std::io::{Read, Write};
use std::net::{TcpListener, UdpSocket};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use aquifer_membership::{About, Gossip, Key, Member, Now, Output};
use aquifer_transport::tls;
use rustls::{ServerConnection, StreamOwned};

use super::Host;

/// Returns the JSON that answers a request for a path; `None` for an answer of 404.
pub type Says = dyn Fn(&str) -> Option<String> + Send + Sync;

/// Takes the place of `host`, whose agent does not run. Tells all hosts by gossip that it knows new
/// agreements, and answers requests. The threads end with the test program.
pub fn lie(host: &Host, contact: &Host, says: Box<Says>) {
    gossip(host, contact);
    let listener = TcpListener::bind(host.api()).unwrap();
    let config = tls::Identity::load(&host.tls()).unwrap().server_config();
    let says: Arc<Says> = says.into();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (config, says) = (config.clone(), says.clone());
            thread::spawn(move || {
                let connection = ServerConnection::new(config).unwrap();
                answer(&mut StreamOwned::new(connection, stream), &*says);
            });
        }
    });
}

/// Answers one request without a body.
fn answer(stream: &mut (impl Read + Write), says: &Says) {
    let (mut heard, mut byte) = (Vec::new(), [0]);
    while !heard.ends_with(b"\r\n\r\n") && matches!(stream.read(&mut byte), Ok(1)) {
        heard.push(byte[0]);
    }
    let request = String::from_utf8_lossy(&heard).into_owned();
    let path = request.split(' ').nth(1).unwrap_or_default();
    let (status, body) = says(path).map_or(("404 Not Found", "{}".to_owned()), |it| ("200 OK", it));
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
         connection: close\r\n\r\n",
        body.len()
    );
    // The caller may be gone.
    let _ = stream.write_all((head + &body).as_bytes()).and_then(|()| stream.flush());
}

fn gossip(host: &Host, contact: &Host) {
    let key = std::fs::read_to_string(host.cluster().join("gossip.key")).unwrap();
    let key = Key::from_hex(&key).unwrap();
    let wall = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let life = u64::try_from(wall().as_millis()).unwrap();
    let member = |host: &Host, life| Member { host: host.host_name(), address: host.api(), life };
    let random = u128::from(life);
    let mut machine = Gossip::new(member(host, life), About::default(), key, random);
    machine.meet([member(contact, 0)]);
    let socket = UdpSocket::bind(host.api()).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    thread::spawn(move || {
        let begun = Instant::now();
        let mut buffer = vec![0; 1 << 16];
        loop {
            let now = Now { steady: begun.elapsed(), wall: wall() };
            let mut outputs = machine.tick(now);
            outputs.extend(machine.tell_agreements(now.steady.as_secs(), now));
            if let Ok((length, _)) = socket.recv_from(&mut buffer) {
                outputs.extend(machine.receive(&buffer[..length], now).unwrap_or_default());
            }
            for output in outputs {
                if let Output::Send { to, datagram } = output {
                    let _ = socket.send_to(&datagram, to);
                }
            }
        }
    });
}
