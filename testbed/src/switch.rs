//! A virtual Ethernet switch: one port per host, and no uplink.
//!
//! A frame is a datagram on a socket pair; QEMU holds the other end. Senders wait for receivers
//! (QEMU then holds the guest's queue), so a slow guest slows others down rather than losing
//! frames.

use std::io;
use std::os::unix::net::UnixDatagram;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use aquifer_page::lock;

/// How long a frame waits for a guest that takes none; then the frame is lost.
const FRAME_TIMEOUT: Duration = Duration::from_millis(200);

/// Size of a receive buffer in bytes, more than any frame of a guest.
const FRAME_BUFFER_BYTES: usize = 64 << 10;

/// First five bytes of the ports' MAC addresses; the last byte is the port's number plus one.
const MAC_PREFIX: [u8; 5] = [0x52, 0x54, 0, 0, 0x77];

#[derive(Debug)]
pub(crate) struct Switch {
    ports: Vec<Port>,
}

#[derive(Debug)]
struct Port {
    socket: Mutex<Option<Arc<UnixDatagram>>>,
    up: AtomicBool,
}

impl Port {
    fn is_up(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }

    fn socket(&self) -> Option<Arc<UnixDatagram>> {
        lock(&self.socket).clone()
    }

    fn replace(&self, socket: Option<Arc<UnixDatagram>>) {
        let old = std::mem::replace(&mut *lock(&self.socket), socket);
        // Wakes the thread that receives from the old socket.
        old.map(|old| old.shutdown(std::net::Shutdown::Both));
    }

    fn deliver(&self, frame: &[u8]) {
        if let Some(socket) = self.socket().filter(|_| self.is_up()) {
            // A guest that takes nothing, or is gone, loses the frame, as on a wire.
            let _ = socket.send(frame);
        }
    }
}

impl Switch {
    /// Creates a switch with all links up and nothing plugged in.
    pub(crate) fn new(ports: usize) -> Arc<Self> {
        let port = || Port { socket: Mutex::new(None), up: AtomicBool::new(true) };
        Arc::new(Self { ports: (0..ports).map(|_| port()).collect() })
    }

    /// Returns the MAC address of the guest at a port.
    pub(crate) fn mac(port: usize) -> String {
        let bytes = MAC_PREFIX.into_iter().chain([u8::try_from(port + 1).unwrap_or(u8::MAX)]);
        bytes.map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":")
    }

    /// Plugs a guest in, in place of an earlier one; returns its end of the wire.
    ///
    /// # Errors
    /// If the kernel provides no sockets.
    pub(crate) fn plug(self: &Arc<Self>, port: usize) -> io::Result<UnixDatagram> {
        let (ours, theirs) = UnixDatagram::pair()?;
        ours.set_write_timeout(Some(FRAME_TIMEOUT))?;
        let ours = Arc::new(ours);
        self.ports[port].replace(Some(ours.clone()));
        // Only a weak reference: the thread ends with the switch.
        let switch = Arc::downgrade(self);
        thread::spawn(move || {
            let mut frame = vec![0; FRAME_BUFFER_BYTES];
            while let Ok(len @ 1..) = ours.recv(&mut frame) {
                match switch.upgrade() {
                    Some(switch) => switch.forward(port, &frame[..len]),
                    None => return,
                }
            }
        });
        Ok(theirs)
    }

    /// Unplugs the guest at a port.
    pub(crate) fn unplug(&self, port: usize) {
        self.ports[port].replace(None);
    }

    /// Sets whether a port's link carries frames.
    pub(crate) fn set_link(&self, port: usize, up: bool) {
        self.ports[port].up.store(up, Ordering::Relaxed);
    }

    fn forward(&self, from: usize, frame: &[u8]) {
        let Some(destination) = frame.get(..6).filter(|_| self.ports[from].is_up()) else { return };
        // The lowest bit of the first byte marks a group address (IEEE 802).
        if destination[0] & 1 == 1 {
            let others = self.ports.iter().enumerate().filter(|(to, _)| *to != from);
            others.for_each(|(_, port)| port.deliver(frame));
        } else if destination[..5] == MAC_PREFIX {
            let port = usize::from(destination[5]).checked_sub(1).and_then(|to| self.ports.get(to));
            if let Some(port) = port {
                port.deliver(frame);
            }
        }
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        self.ports.iter().for_each(|port| port.replace(None));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(to: [u8; 6], content: u8) -> Vec<u8> {
        [&to[..], &[content; 54]].concat()
    }

    fn address(port: u8) -> [u8; 6] {
        [0x52, 0x54, 0, 0, 0x77, port + 1]
    }

    fn received(socket: &UnixDatagram) -> Option<u8> {
        socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let mut buffer = [0; 100];
        socket.recv(&mut buffer).ok().map(|len| buffer[len - 1])
    }

    #[test]
    fn frames_reach_their_address_unless_the_link_is_cut() {
        let switch = Switch::new(3);
        let [a, b, c] = [0, 1, 2].map(|port| switch.plug(port).unwrap());
        a.send(&frame(address(1), 1)).unwrap();
        a.send(&frame([0xff; 6], 2)).unwrap();
        assert_eq!((received(&b), received(&b)), (Some(1), Some(2)));
        assert_eq!(received(&c), Some(2));

        switch.set_link(1, false);
        a.send(&frame(address(1), 3)).unwrap();
        b.send(&frame(address(2), 4)).unwrap();
        assert_eq!((received(&b), received(&c), received(&a)), (None, None, None));
        switch.set_link(1, true);
        b.send(&frame(address(2), 5)).unwrap();
        assert_eq!(received(&c), Some(5));
    }

    #[test]
    fn an_unplugged_or_stalled_guest_delays_others_only_briefly() {
        let switch = Switch::new(3);
        let [a, _deaf, c] = [0, 1, 2].map(|port| switch.plug(port).unwrap());
        a.set_write_timeout(Some(Duration::from_secs(5))).unwrap();
        // The deaf guest's queue is full after the first frames; each further frame waits for its
        // timeout.
        let queue: usize = std::fs::read_to_string("/proc/sys/net/unix/max_dgram_qlen")
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        for _ in 0..queue + 3 {
            a.send(&frame(address(1), 1)).unwrap();
        }
        switch.unplug(1);
        a.send(&frame(address(1), 1)).unwrap();
        a.send(&frame(address(2), 2)).unwrap();
        c.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        assert_eq!(c.recv(&mut [0; 100]).unwrap(), 60);
    }
}
