//! The agent's connection with the host, and the host's orders.

use std::io;
use std::time::{Duration, Instant};

use aquifer_page::Bytes;
use rustix::event::epoll::EventFlags;

use super::Options;
use super::event_loop::{Agent, HOST, add};
use super::link::{After, Link};
use super::pending::Asker;
use super::port::Port;
use crate::application_message::{Granted, Reason, Tell};
use crate::message::{GuestReport, Line, ToGuest, ToHost, VERSION};
use crate::trace;
use crate::urgency::SampledMemory;

/// How often a missing port is looked for.
const LOOK_FOR: Duration = Duration::from_secs(1);

/// How long an unfinished stage may delay the answer to [`ToGuest::Trace`], and how often it is
/// polled.
const STAGE_ENDS: Duration = Duration::from_secs(3);
const STAGE_LOOK: Duration = Duration::from_millis(5);

/// How long the kernel may take to bring memory online before the agent does, and how long a check
/// may take in all.
const ONLINING: Duration = Duration::from_millis(500);
const CHECKING: Duration = Duration::from_secs(2);

/// How often a check is repeated meanwhile.
const CHECK_LOOK: Duration = Duration::from_millis(20);

/// The shortest and the longest period of reports, in ms.
const PERIODS: (u64, u64) = (50, 24 * 60 * 60 * 1000);

/// A question whose answer waits until no stage is in progress.
#[derive(Clone, Copy, Debug)]
struct Tracing {
    id: u64,
    /// Whether to go on measuring.
    goes_on: bool,
    until: Instant,
    /// When to look again.
    look: Instant,
}

/// A question that is answered once the kernel counts `total`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Check {
    id: u64,
    total: Bytes,
    since: Instant,
    /// When the agent last tried to bring memory online.
    tried: Instant,
}

/// The agent's connection with the host.
#[derive(Debug)]
pub(super) struct Host {
    port: Port,
    link: Option<Link<ToGuest>>,
    /// Whether the link works again after the host has gone and come back: a port does, a socket
    /// does not.
    lasting: bool,
    connected: bool,
    next_open: Instant,
    complained: Option<String>,
    pub(super) period: Option<Duration>,
    next_report: Option<Instant>,
    tracing: Option<Tracing>,
}

impl Host {
    pub(super) fn new(options: &Options) -> Self {
        Self {
            port: Port::new(options.port.clone(), &options.root),
            link: None,
            lasting: true,
            connected: false,
            next_open: Instant::now(),
            complained: None,
            period: None,
            next_report: None,
            tracing: None,
        }
    }

    pub(super) fn connected(&self) -> bool {
        self.connected
    }

    pub(super) fn is_behind(&self) -> bool {
        self.connected && self.link.as_ref().is_some_and(Link::is_behind)
    }

    /// Returns when the agent has to act although the host is silent.
    pub(super) fn next_time(&self) -> Option<Instant> {
        match &self.link {
            None => Some(self.next_open),
            Some(_) if !self.connected => None,
            Some(_) => [self.next_report, self.tracing.map(|tracing| tracing.look)]
                .into_iter()
                .flatten()
                .min(),
        }
    }

    /// Sends a message if the host is connected. A failure soon shows as the end of the link.
    pub(super) fn say(&mut self, message: &ToHost) {
        if self.connected
            && let Some(link) = &mut self.link
            && let Err(error) = link.send(message)
        {
            eprintln!("aquifer-guest: cannot send a message to the host: {error}");
        }
    }

    pub(super) fn flush(&mut self) {
        if let Some(link) = &mut self.link {
            // A failure soon shows as the end of the link.
            let _ = link.flush();
        }
    }

    fn open(&mut self, epoll: impl std::os::fd::AsFd) -> io::Result<()> {
        let opened = self.port.open()?;
        self.lasting = opened.lasting;
        let link = Link::new(opened.file);
        // Edge-triggered: a port without a host reports a hang-up all the time, so that only an
        // edge shows that the host has come.
        add(epoll, &link, HOST, EventFlags::IN | EventFlags::OUT | EventFlags::ET)?;
        self.link = Some(link);
        Ok(())
    }
}

impl Agent {
    /// Opens the port, if it is closed and the next attempt is due.
    pub(super) fn reach_host(&mut self, now: Instant) {
        if self.host.link.is_some() || now < self.host.next_open {
            return;
        }
        self.host.next_open = now + LOOK_FOR;
        match self.host.open(&self.epoll) {
            Ok(()) => self.host.complained = None,
            Err(error) => {
                let complaint = format!("cannot connect to the host: {error}");
                if self.host.complained.as_ref() != Some(&complaint) {
                    eprintln!("aquifer-guest: {complaint}");
                    self.host.complained = Some(complaint);
                }
            }
        }
    }

    /// Handles an event of the port.
    pub(super) fn hear_host(&mut self, flags: EventFlags) {
        let Some(link) = &mut self.host.link else { return };
        if flags.contains(EventFlags::HUP) {
            return self.host_gone(self.host.lasting);
        }
        if !self.host.connected {
            self.host.connected = true;
            let _ = link.begin();
            self.hello();
        }
        let Some(link) = &mut self.host.link else { return };
        let mut lines = Vec::new();
        let after =
            link.receive(|line| lines.push(line)).and_then(|after| link.flush().map(|()| after));
        for line in lines {
            match line {
                // Perhaps another host, which has come since the last event and has heard no
                // `Hello`.
                Line::Empty => self.hello(),
                Line::Message(message) => self.obey(message),
            }
        }
        match after {
            Ok(After::More) => {}
            Ok(After::End) => self.host_gone(self.host.lasting),
            Err(_) => self.host_gone(false),
        }
    }

    fn hello(&mut self) {
        let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
        self.host.say(&ToHost::Hello { version: VERSION, kernel });
    }

    fn obey(&mut self, message: ToGuest) {
        let now = Instant::now();
        match message {
            ToGuest::Watch { period_ms, urgent_below } => {
                let period = period_ms.clamp(PERIODS.0, PERIODS.1);
                self.host.period = (period_ms > 0).then_some(Duration::from_millis(period));
                self.host.next_report = self.host.period.map(|_| now);
                self.watch.set_limit(urgent_below, now);
            }
            ToGuest::Check { id, total } => {
                self.checks.push(Check { id, total, since: now, tried: now });
                self.answer_checks(now);
            }
            ToGuest::Trace { id, on: true } if !self.tracer.is_on() => {
                let missing = self.tracer.start().map(<[String]>::to_vec);
                let missing = missing.unwrap_or_else(|error| {
                    eprintln!("aquifer-guest: cannot trace the stages of a resize: {error}");
                    trace::all()
                });
                self.host.say(&ToHost::Stages { id, stages: Vec::new(), missing });
            }
            ToGuest::Trace { id, on } => {
                self.finish_tracing(now, true);
                self.host.tracing =
                    Some(Tracing { id, goes_on: on, until: now + STAGE_ENDS, look: now });
                self.finish_tracing(now, false);
            }
            ToGuest::Answer { id, granted, size, missing, why } => {
                match self.pending.answered(id) {
                    Some(Asker::Own) => self.watch.settled(now),
                    Some(Asker::Client(client)) => {
                        self.tell(client, &Tell::Granted(Granted { granted, size, missing, why }));
                    }
                    // The agent has already told the application that there is no answer.
                    None => {}
                }
            }
        }
    }

    /// Answers the checks whose memory the kernel counts by now, and those that have waited long
    /// enough.
    pub(super) fn answer_checks(&mut self, now: Instant) {
        if self.checks.is_empty() {
            return;
        }
        let Ok(SampledMemory { mut total, .. }) = self.watch.sample() else { return };
        let mut checks = std::mem::take(&mut self.checks);
        for check in &mut checks {
            // By now the kernel has brought the memory online by itself, or never will.
            if check.total > total && now.saturating_duration_since(check.tried) > ONLINING {
                check.tried = now;
                if let Some(report) = logged(self.watch.check(self.options.online)) {
                    total = report.total;
                }
            }
        }
        let is_done = |check: &Check| {
            check.total <= total || now.saturating_duration_since(check.since) > CHECKING
        };
        let (done, left): (Vec<_>, Vec<_>) = checks.into_iter().partition(is_done);
        self.checks = left;
        for Check { id, total, .. } in done {
            // A check for zero bytes asks to bring online all memory blocks.
            let report = if total == Bytes::ZERO {
                self.watch.check(self.options.online)
            } else {
                self.watch.read()
            };
            if let Some(report) = logged(report) {
                self.host.say(&ToHost::Checked { id, report });
            }
        }
    }

    /// Returns when checks are repeated even without an event of the kernel.
    pub(super) fn next_check(&self, now: Instant) -> Option<Instant> {
        (!self.checks.is_empty()).then(|| now + CHECK_LOOK)
    }

    /// Sends a report, if it is due.
    pub(super) fn report_if_due(&mut self, now: Instant) {
        let (Some(due), Some(period)) = (self.host.next_report, self.host.period) else { return };
        if now < due {
            return;
        }
        self.host.next_report = Some(now + period);
        // A host that does not read gets the newest report once it does.
        if self.host.is_behind() {
            return;
        }
        if let Some(report) = logged(self.watch.read()) {
            self.host.say(&ToHost::Report(report));
        }
    }

    /// Answers [`ToGuest::Trace`] once no stage is in progress, or it has waited long enough.
    pub(super) fn finish_tracing(&mut self, now: Instant, at_once: bool) {
        let Some(Tracing { id, goes_on, until, look }) = self.host.tracing else { return };
        if now < look && !at_once {
            return;
        }
        let measured = match self.tracer.read(at_once || now >= until) {
            Ok(None) => {
                self.host.tracing = Some(Tracing { id, goes_on, until, look: now + STAGE_LOOK });
                return;
            }
            Ok(Some(measured)) => measured,
            Err(error) => {
                eprintln!("aquifer-guest: cannot read the stages of a resize: {error}");
                trace::Measured { stages: Vec::new(), missing: trace::all() }
            }
        };
        self.host.tracing = None;
        if !goes_on || self.tracer.forget().is_err() {
            self.tracer.stop();
        }
        self.host.say(&ToHost::Stages { id, stages: measured.stages, missing: measured.missing });
    }

    /// Resets the agent's state after the host has gone, or was found to be absent.
    fn host_gone(&mut self, may_come_again: bool) {
        if let Some(link) = &mut self.host.link {
            link.forget();
        }
        if !may_come_again {
            self.host.link = None;
            self.host.next_open = Instant::now() + LOOK_FOR;
        }
        self.host.connected = false;
        self.host.period = None;
        self.host.next_report = None;
        self.host.tracing = None;
        self.checks.clear();
        self.tracer.stop();
        self.watch.end();
        while let Some(asker) = self.pending.any() {
            if let Asker::Client(client) = asker {
                let error = "the host disconnected before it answered, and may still carry the \
                             request out";
                self.tell(
                    client,
                    &Tell::Failed { reason: Reason::HostAway, error: error.to_owned() },
                );
            }
        }
    }
}

/// Returns the figures, or logs why there are none.
fn logged(report: io::Result<GuestReport>) -> Option<GuestReport> {
    report
        .inspect_err(|error| {
            eprintln!("aquifer-guest: cannot read the guest's memory figures: {error}");
        })
        .ok()
}
