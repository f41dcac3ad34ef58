//! Admin queues: the description of controller and namespace, events, and the keep alive timeout.

mod events;
mod features;
mod identify;
mod introduction;
mod logs;

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use aquifer_page::visitor::End;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::connection::Nvme;
use super::controller::{ADMIN, Controller};
use super::data::check_flags;
use super::link::Link;
use super::parse::{Payload, Pdu};
use super::{Broken, Fatal};
use crate::proto::command::{FABRICS, admin};
use crate::proto::fabrics::{PROPERTY_8_BYTES, kind};
use crate::proto::{Command, NvmeStatus};
use events::Events;

/// Factor on the host's keep alive timeout. Hosts check every half timeout, and skip the Keep Alive
/// if a command has completed since. The next Keep Alive may then come shortly after the timeout.
const TIMEOUT: u32 = 2;

/// An admin queue.
pub(super) struct AdminQueue<'a> {
    link: &'a mut Link,
    service: &'a Nvme,
    controller: Arc<Controller>,
    /// The host's keep alive timeout; `None` if it set none.
    keep_alive: Option<Duration>,
    alive: Instant,
    events: Events,
    /// Makes a function by which another thread ends this connection.
    end: &'a dyn Fn() -> io::Result<End>,
    /// The reason why the last introduction was refused.
    refusal: String,
}

/// The answer to a command.
enum Answer {
    /// A completion with this result.
    Result(u64),
    /// Data, with a successful completion.
    Data(Vec<u8>),
    /// No answer until an event occurs.
    Later,
}

impl<'a> AdminQueue<'a> {
    pub(super) fn new(
        link: &'a mut Link,
        service: &'a Nvme,
        controller: Arc<Controller>,
        keep_alive: Option<Duration>,
        end: &'a dyn Fn() -> io::Result<End>,
    ) -> Self {
        let (alive, events, refusal) = (Instant::now(), Events::default(), String::new());
        Self { link, service, controller, keep_alive, alive, events, end, refusal }
    }

    /// Executes commands until the host closes the connection or its keep alive timeout expires.
    pub(super) fn run(&mut self) -> Result<(), Broken> {
        loop {
            while let Some(pdu) = self.link.next()? {
                self.alive = Instant::now();
                match pdu {
                    Pdu::Command(command, payload) => self.execute(&command, payload)?,
                    // Commands of this queue bring their data in the capsule only.
                    Pdu::Data(..) => {
                        return Err(Fatal::sequence("data that no command requested").into());
                    }
                    Pdu::Request(_) => return Err(Fatal::sequence("a second ICReq").into()),
                }
            }
            self.tell_events()?;
            self.link.flush()?;
            if !self.wait()? {
                return Ok(());
            }
        }
    }

    /// Returns how long the host may be silent; `None` is forever.
    fn io_timeout(&self) -> Option<Duration> {
        let discovery =
            || self.controller.is_discovery().then_some(self.service.core.limits.discovery);
        self.keep_alive.map(|keep_alive| keep_alive * TIMEOUT).or_else(discovery)
    }

    /// Waits for the host or a notice. Returns false if the host has closed the connection.
    fn wait(&mut self) -> Result<bool, Broken> {
        let timeout = match self.io_timeout() {
            None => None,
            Some(io_timeout) => {
                if self.controller.take_traffic() {
                    self.alive = Instant::now();
                }
                let left = io_timeout.saturating_sub(self.alive.elapsed());
                if left.is_zero() {
                    return Err(Broken::Silent);
                }
                Some(left)
            }
        };
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let controller = Arc::clone(&self.controller);
        let mut fds = [
            PollFd::from_borrowed_fd(self.link.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(controller.wakeup.as_fd(), PollFlags::IN),
        ];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
        let [host, wakeup] = fds.map(|fd| !fd.revents().is_empty());
        if wakeup {
            controller.wakeup.reset();
        }
        if host { self.link.fill() } else { Ok(true) }
    }

    fn execute(&mut self, command: &Command, payload: Payload) -> Result<(), Broken> {
        let answer = match command.opcode {
            FABRICS => self.fabrics(command),
            _ if !self.controller.is_ready() => Err(NvmeStatus::COMMAND_SEQUENCE.final_()),
            _ => self.admin(command, payload),
        };
        let id = command.id.get();
        match answer {
            Ok(Answer::Result(result)) => self.link.complete(id, NvmeStatus::SUCCESS, result)?,
            Ok(Answer::Data(bytes)) => self.link.answer_bytes(id, &bytes)?,
            Ok(Answer::Later) => {}
            Err(status) => self.link.complete(id, status, 0)?,
        }
        Ok(())
    }

    /// Gets or sets a property of the size that the command names (Base, section 6.5 "Property Get
    /// command" and section 6.6 "Property Set command").
    fn fabrics(&mut self, command: &Command) -> Result<Answer, NvmeStatus> {
        let (attributes, offset) = (command.dword(10), command.dword(11));
        let eight_bytes = attributes & 0b111 == PROPERTY_8_BYTES;
        match command.fabrics_type() {
            kind::PROPERTY_GET => self.controller.property(offset, eight_bytes).map(Answer::Result),
            kind::PROPERTY_SET if eight_bytes => Err(NvmeStatus::INVALID_FIELD.final_()),
            kind::PROPERTY_SET => {
                if self.controller.set_property(offset, command.dword(12))? {
                    // A reset clears all events, requests and settings.
                    self.events = Events::default();
                }
                Ok(Answer::Result(0))
            }
            kind::CONNECT => Err(NvmeStatus::COMMAND_SEQUENCE.final_()),
            // It ends I/O queues only (Base, section 6.4 "Disconnect command").
            kind::DISCONNECT => Err(NvmeStatus::QUEUE_TYPE.final_()),
            _ => Err(NvmeStatus::INVALID_OPCODE.final_()),
        }
    }

    fn admin(&mut self, command: &Command, payload: Payload) -> Result<Answer, NvmeStatus> {
        check_flags(command)?;
        match command.opcode {
            admin::IDENTIFY => self.identify(command).map(Answer::Data),
            admin::GET_LOG_PAGE => self.log_page(command).map(Answer::Data),
            admin::GET_FEATURES => self.get_feature(command),
            admin::SET_FEATURES => self.set_feature(command),
            admin::ASYNC_EVENT_REQUEST => self.events.request(command.id.get()),
            admin::KEEP_ALIVE => Ok(Answer::Result(0)),
            admin::ABORT if !self.controller.is_discovery() => self.abort(command),
            admin::INTRODUCE if !self.controller.is_discovery() => self.introduce(command, payload),
            admin::REFUSAL if !self.controller.is_discovery() => {
                self.tell_refusal(command).map(Answer::Data)
            }
            _ => Err(NvmeStatus::INVALID_OPCODE.final_()),
        }
    }

    /// Aborts an asynchronous event request. All other commands complete before a host can abort
    /// them.
    ///
    /// The aborted command completes before the Abort, whose result says whether there was one
    /// (Base, section 5.1 "Abort command").
    fn abort(&mut self, command: &Command) -> Result<Answer, NvmeStatus> {
        const NOT_ABORTED: u64 = 1;
        let (queue, id) = (command.dword(10) as u16, (command.dword(10) >> 16) as u16);
        if queue != ADMIN || !self.events.withdraw(id) {
            return Ok(Answer::Result(NOT_ABORTED));
        }
        // If this fails, the next send fails as well.
        let _ = self.link.complete(id, NvmeStatus::ABORT_REQUESTED, 0);
        Ok(Answer::Result(0))
    }

    /// Reports pending events by the waiting requests.
    fn tell_events(&mut self) -> Result<(), Broken> {
        self.events.note(self.controller.notices.swap(0, Ordering::SeqCst));
        while let Some((id, event)) = self.events.next() {
            self.link.complete(id, NvmeStatus::SUCCESS, event.into())?;
        }
        Ok(())
    }
}
