//! The agent's connections with applications, which ask for memory or for the status.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;

use super::event_loop::{Agent, add};
use super::link::{After, Link};
use super::pending::Asker;
use crate::application_message::{Ask, GuestStatus, LENIENCE, Reason, Tell};
use crate::message::{Line, ToHost};

/// Most applications connected at a time.
const MOST: usize = 256;

/// Pause after an application that could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// Longest time that an application can wait for an answer.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Longest text of an application that reaches the host, in characters.
const MOST_WORDS: usize = 1000;

/// A connected application.
#[derive(Debug)]
pub(super) struct Application {
    link: Link<Ask>,
    /// The application sends nothing more, but may wait for an answer.
    ended: bool,
}

impl Agent {
    /// Accepts all applications that wait at the socket.
    pub(super) fn let_in(&mut self) {
        loop {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    eprintln!("aquifer-guest: cannot accept applications: {error}");
                    // Mostly for want of file descriptors. The listener stays ready, so that
                    // without a pause this would spin.
                    thread::sleep(PAUSE);
                    return;
                }
            };
            // An application that is not accepted sees the end of the stream at once.
            if self.applications.len() >= MOST || stream.set_nonblocking(true).is_err() {
                continue;
            }
            let number = self.next_application;
            let link = Link::new(stream.into());
            if add(&self.epoll, &link, number, EventFlags::IN | EventFlags::OUT | EventFlags::ET)
                .is_ok()
            {
                self.next_application += 1;
                self.applications.insert(number, Application { link, ended: false });
            }
        }
    }

    /// Handles an event of an application: a request, room to send, or the end.
    pub(super) fn hear_application(&mut self, number: u64) {
        let Some(application) = self.applications.get_mut(&number) else { return };
        let mut asked = Vec::new();
        let link = &mut application.link;
        let after =
            link.receive(|line| asked.push(line)).and_then(|after| link.flush().map(|()| after));
        application.ended |= matches!(after, Ok(After::End));
        if after.is_err() {
            self.applications.remove(&number);
            return;
        }
        for line in asked {
            if let Line::Message(ask) = line {
                self.answer(number, ask);
            }
        }
        self.see_out(number);
    }

    /// Sends a message to an application, if it is still connected.
    pub(super) fn tell(&mut self, number: u64, tell: &Tell) {
        let Some(application) = self.applications.get_mut(&number) else { return };
        if application.link.send(tell).is_err() {
            self.applications.remove(&number);
        }
        self.see_out(number);
    }

    /// Ends a request that the host has not answered in time.
    pub(super) fn no_answer(&mut self, asker: Asker, now: Instant) {
        match asker {
            Asker::Own => self.watch.settled(now),
            Asker::Client(client) => {
                let error = "the connected host did not answer in time, and may still carry the \
                             request out";
                self.tell(
                    client,
                    &Tell::Failed { reason: Reason::NoAnswer, error: error.to_owned() },
                );
            }
        }
    }

    /// Forgets an application that sends nothing more and waits for nothing.
    fn see_out(&mut self, number: u64) {
        let done =
            |one: &Application| one.ended && !one.link.is_behind() && !self.pending.has(number);
        if self.applications.get(&number).is_some_and(done) {
            self.applications.remove(&number);
        }
    }

    fn answer(&mut self, number: u64, ask: Ask) {
        let told = match ask {
            Ask::Show => self.status().map(Tell::Shown).unwrap_or_else(|error| {
                let error = format!("cannot read the guest's memory figures: {error}");
                Tell::Failed { reason: Reason::Other, error }
            }),
            Ask::Resize { bytes, timeout_ms, why } => {
                match self.pass_on(number, bytes, timeout_ms, &why) {
                    Ok(()) => return,
                    Err((reason, error)) => Tell::Failed { reason, error: error.to_owned() },
                }
            }
        };
        self.tell(number, &told);
    }

    fn status(&mut self) -> io::Result<GuestStatus> {
        let report = self.watch.read()?;
        Ok(GuestStatus {
            connected: self.host.connected(),
            period_ms: self.host.period.map(|period| period.as_millis() as u64),
            urgent_below: self.watch.limit(),
            watches_pressure: self.pressure.is_some(),
            pending: self.pending.len(),
            report,
        })
    }

    /// Passes a request on to the host, or says why not.
    fn pass_on(
        &mut self,
        number: u64,
        bytes: i64,
        timeout_ms: u64,
        why: &str,
    ) -> Result<(), (Reason, &'static str)> {
        if bytes == 0 {
            return Err((Reason::Other, "the request is for zero bytes: ask for more or for less"));
        }
        if self.pending.has(number) {
            return Err((
                Reason::Other,
                "the connection has a pending request: wait for its answer, or connect again",
            ));
        }
        if !self.host.connected() {
            return Err((
                Reason::HostAway,
                "no host is connected to this guest's port: the host may not run Aquifer, or its \
                 supervisor may be restarting",
            ));
        }
        let timeout = Duration::from_millis(timeout_ms).min(LONGEST_TIMEOUT);
        let id = self.pending.add(Asker::Client(number), Instant::now(), timeout + LENIENCE);
        let why = why.chars().take(MOST_WORDS).collect();
        self.host.say(&ToHost::Request { id, bytes, urgent: false, timeout_ms, why });
        Ok(())
    }
}
