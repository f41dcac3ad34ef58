//! Hand-overs of a region, each bound to one connection: a hand-over ends with its connection.

use std::io;
use std::os::unix::net::UnixStream;
use std::thread;

use aquifer_control_socket::Client;

use super::control::Serving;
use super::message::{Request, Response};
use crate::engine::Incoming;
use crate::error::RegionError;
use crate::handover::Frame;

/// The most pages that one `Hot` frame names.
const HOT: u64 = 1 << 20;

impl Serving {
    /// Makes the region this host's.
    pub(super) fn own(&self) -> Result<(), RegionError> {
        self.files.make_foreign(false)?;
        self.engine.own();
        Ok(())
    }

    /// Sends or receives frames until the other end closes. A region that was not given away by
    /// then stays here.
    pub(super) fn hand_over(&self, request: &Request, client: &Client) -> io::Result<()> {
        let sends = *request == Request::Send;
        // If the region was given away already, the peer only fetches pages that were left behind.
        let begins = sends && !self.files.is_foreign();
        let begun = if begins { self.engine.begin_outgoing() } else { Ok(()) };
        if let Err(error) = begun {
            return client.answer(&Response::Failed { error: error.to_string() });
        }
        let stream = client.stream();
        let done = client
            .answer(&Response::Done)
            .and_then(|()| stream.set_read_timeout(None))
            .and_then(|()| stream.set_write_timeout(None))
            .and_then(|()| if sends { self.send(stream) } else { self.receive(stream) });
        if sends && !self.files.is_foreign() {
            self.engine.own();
        }
        done
    }

    fn send(&self, mut client: &UnixStream) -> io::Result<()> {
        let (mut orders, mut data) = (client, Vec::new());
        while let Some(frame) = Frame::receive(&mut orders, &mut data)? {
            let mut to_client = |frame: &Frame, data: &[u8]| frame.send(&mut client, data);
            let reply = match frame {
                Frame::Round(round) => self.engine.round(round, &mut to_client).map(Frame::Sent),
                Frame::GiveAway => self.files.make_foreign(true).map(|()| Frame::Done),
                Frame::Want(pages) => {
                    self.engine.send_postcopy(&pages, &mut to_client).map(|()| Frame::Done)
                }
                Frame::TellHot => Ok(Frame::Hot(self.engine.hot(HOT))),
                other => Err(RegionError::Misuse(format!(
                    "unexpected message for an outgoing region: {other:?}"
                ))),
            };
            reply
                .unwrap_or_else(|error| Frame::Failed(error.to_string()))
                .send(&mut client, &[])?;
        }
        Ok(())
    }

    fn receive(&self, mut client: &UnixStream) -> io::Result<()> {
        let (mut incoming, mut data) = (Incoming::default(), Vec::new());
        let mut failed = None;
        let (mut frames, mut cursor) = (client, 0);
        while let Some(frame) = Frame::receive(&mut frames, &mut data)? {
            match frame {
                Frame::Sync => {
                    let reply = failed.clone().map_or(Frame::Done, Frame::Failed);
                    reply.send(&mut client, &[])?;
                }
                Frame::Next { all } => {
                    let next = || {
                        self.engine
                            .next_postcopy(all.then_some(&mut cursor))
                            .map_err(|error| error.to_string())
                    };
                    let reply = match failed.clone().map_or_else(next, Err) {
                        Ok(pages) if all && pages.is_empty() => Frame::Done,
                        Ok(pages) => Frame::Want(pages),
                        Err(why) => Frame::Failed(why),
                    };
                    reply.send(&mut client, &[])?;
                }
                Frame::Hot(pages) => {
                    let engine = self.engine.clone();
                    thread::Builder::new()
                        .name("warm".to_owned())
                        .spawn(move || engine.warm(&pages))?;
                }
                _ if failed.is_some() => {}
                frame => {
                    let noted = match frame {
                        Frame::Leases => self.note_sent_leases(&data),
                        _ => Ok(()),
                    };
                    let taken =
                        noted.and_then(|()| self.engine.take_in(&mut incoming, &frame, &data));
                    failed = taken.err().map(|error| error.to_string());
                }
            }
        }
        Ok(())
    }
}
