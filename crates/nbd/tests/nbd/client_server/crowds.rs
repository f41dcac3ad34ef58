//! Tests of the limit on connections per host, where loopback addresses stand for hosts.

use std::io::Read;
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::os::fd::OwnedFd;

use aquifer_nbd::client::{Connection, NbdError};
use aquifer_nbd::server::Limits;
use aquifer_transport::channel::Socket;
use aquifer_transport::{Address, ConnectionLimits};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};

use super::{NbdLender, TIMEOUT, tcp};
use crate::common::wait_until;

const FIRST: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const SECOND: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 3);

fn lender() -> NbdLender {
    let connections = ConnectionLimits { all: 8, per_host: 4, exempts_loopback: false };
    NbdLender::with(tcp, None, Limits { connections, handshake: 2 * TIMEOUT })
}

impl NbdLender {
    /// Connects from this address and sends nothing.
    fn caller(&self, from: Ipv4Addr) -> TcpStream {
        let Address::Tcp { port, .. } = *self.server.address() else {
            panic!("a TCP server is needed")
        };
        let socket =
            socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let socket: OwnedFd = socket.unwrap();
        bind(&socket, &SocketAddrV4::new(from, 0)).unwrap();
        connect(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, port)).unwrap();
        let stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream
    }

    fn client(&self, from: Ipv4Addr) -> Result<Connection, NbdError> {
        self.greeted(self.caller(from))
    }

    /// Performs the client's handshake.
    fn greeted(&self, caller: TcpStream) -> Result<Connection, NbdError> {
        Connection::over(Box::new(Socket::from(caller)), self.target(None), TIMEOUT)
    }

    /// Connects `count` clients and waits until the lender knows their exports.
    fn steady(&self, from: Ipv4Addr, count: usize) -> Vec<Connection> {
        let before = self.registry.connected();
        let clients = (0..count).map(|_| self.client(from).unwrap()).collect();
        let now = || self.registry.connected();
        wait_until("all are connected", || now() == before + count);
        clients
    }
}

#[test]
fn a_host_with_all_its_connections_keeps_no_other_host_out() {
    let lender = lender();
    let mut first = lender.steady(FIRST, 4);
    assert!(lender.client(FIRST).unwrap_err().ends_connection());
    let mut second = lender.steady(SECOND, 4);
    for client in first.iter_mut().chain(&mut second) {
        client.flush().unwrap();
    }
}

#[test]
fn a_host_full_of_silent_connections_makes_room_among_its_own() {
    let lender = lender();
    let other = lender.caller(SECOND);
    let mut silent: Vec<_> = (0..4).map(|_| lender.caller(FIRST)).collect();
    let mut client = lender.client(FIRST).unwrap();
    silent[0].read_to_end(&mut Vec::new()).expect("the oldest of its own is closed");
    client.flush().unwrap();
    lender.greeted(other).unwrap().flush().unwrap();
}
