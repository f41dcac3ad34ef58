//! A process that needs memory: it fills memory with checked content, holds it and verifies it.
//!
//! Reports are JSON lines on standard output, commands are words on standard input, one a line. The
//! end of standard input means that the commanding process is gone, and ends the load.

mod content;

use std::io::BufRead;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, PAGE_SIZE};
use serde::{Deserialize, Serialize};

use crate::failure::{OrFail, Result};
use crate::output;
use content::Pages;

/// The parameters of a load.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Bytes of memory that it fills.
    pub bytes: Bytes,
    /// Bytes that it fills a second; `None` for as fast as possible.
    pub rate: Option<Bytes>,
    /// The seed of its content.
    pub seed: u64,
    /// Whether it holds the memory and waits for commands; otherwise it verifies once and ends.
    pub hold: bool,
}

/// A report of a load.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// It runs and begins to fill its memory.
    Started {
        /// Pages that it is going to write.
        pages: usize,
    },
    /// It goes on filling or verifying.
    Progress {
        /// The task that it is at.
        doing: Doing,
        /// Pages done, of those in `Started`.
        pages: usize,
    },
    /// All its memory is filled.
    Filled {
        /// Pages written since it started.
        pages_written: u64,
    },
    /// It has read and compared all its memory.
    Verified(Verdict),
    /// It has given its memory back to the system.
    Freed,
    /// It got a command that it does not know.
    Refused {
        /// The reason.
        why: String,
    },
}

/// The tasks of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Doing {
    /// Writing pages.
    Filling,
    /// Reading and comparing pages.
    Verifying,
}

/// The result of a verification.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// Pages written since the load started.
    pub pages_written: u64,
    /// Pages in which every byte equals the last write.
    pub pages_verified: u64,
    /// Pages with a byte that differs from the last write.
    pub pages_lost: u64,
    /// The index of the first lost page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_lost: Option<usize>,
}

/// The commands of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Verify,
    Rewrite,
    Free,
    Quit,
}

/// Runs a load to its end; returns its last verdict.
///
/// # Errors
/// If it cannot turn huge pages off, or cannot report.
pub fn run(plan: Plan) -> Result<Verdict> {
    crate::sys::forgo_huge_pages().or_fail(|| "turning huge pages off")?;
    let orders = if plan.hold { orders() } else { mpsc::channel().1 };
    let mut load = Load::new(plan, orders);
    output::json(&Event::Started { pages: load.pages.len() })?;
    load.fill()?;
    while !load.quit {
        match load.next_order() {
            Order::Verify => load.verify()?,
            Order::Rewrite => load.fill()?,
            Order::Free => load.free()?,
            Order::Quit => load.quit = true,
        }
        load.quit |= !plan.hold;
    }
    Ok(load.verdict)
}

/// How many pages are written between looks at the clock and at the commands.
const BATCH: usize = 64;

/// How often a load reports its progress.
const REPORT: Duration = Duration::from_millis(200);

struct Load {
    plan: Plan,
    pages: Pages,
    orders: Receiver<Result<Order, String>>,
    waiting: Option<Order>,
    verdict: Verdict,
    reported: Instant,
    quit: bool,
}

impl Load {
    fn new(plan: Plan, orders: Receiver<Result<Order, String>>) -> Self {
        let count = usize::try_from(plan.bytes.pages()).unwrap_or(usize::MAX / PAGE_SIZE - 1);
        let pages = Pages::new(count, plan.seed);
        let reported = Instant::now();
        Self {
            plan,
            pages,
            orders,
            waiting: None,
            verdict: Verdict::default(),
            reported,
            quit: false,
        }
    }

    /// Writes every page once more, no faster than planned. A command ends the fill early; it is
    /// carried out next.
    fn fill(&mut self) -> Result<()> {
        let start = Instant::now();
        for first in (0..self.pages.len()).step_by(BATCH) {
            let end = self.pages.len().min(first + BATCH);
            (first..end).for_each(|index| self.pages.write(index));
            self.verdict.pages_written += (end - first) as u64;
            self.report(Doing::Filling, end)?;
            let due = self.plan.rate.map_or(Duration::ZERO, |rate| {
                Duration::from_secs_f64((end * PAGE_SIZE) as f64 / rate.0.max(1) as f64)
            });
            if self.interrupted(due.saturating_sub(start.elapsed())) {
                return Ok(());
            }
        }
        output::json(&Event::Filled { pages_written: self.verdict.pages_written })
    }

    /// Reads and compares every written page.
    fn verify(&mut self) -> Result<()> {
        self.verdict = Verdict { pages_written: self.verdict.pages_written, ..Verdict::default() };
        for index in 0..self.pages.len() {
            if !self.pages.was_written(index) {
                continue;
            }
            if self.pages.verify(index) {
                self.verdict.pages_verified += 1;
            } else {
                self.verdict.pages_lost += 1;
                self.verdict.first_lost.get_or_insert(index);
            }
            if index % BATCH == 0 {
                self.report(Doing::Verifying, index)?;
            }
        }
        output::json(&Event::Verified(self.verdict))
    }

    fn free(&mut self) -> Result<()> {
        self.pages = Pages::new(0, self.plan.seed);
        output::json(&Event::Freed)
    }

    fn report(&mut self, doing: Doing, pages: usize) -> Result<()> {
        if self.reported.elapsed() < REPORT {
            return Ok(());
        }
        self.reported = Instant::now();
        output::json(&Event::Progress { doing, pages })
    }

    /// Returns the command that ended a fill, or waits for the next. A load that does not hold
    /// verifies.
    fn next_order(&mut self) -> Order {
        if !self.plan.hold {
            return Order::Verify;
        }
        if let Some(order) = self.waiting.take() {
            return order;
        }
        loop {
            match self.orders.recv() {
                Ok(Ok(order)) => return order,
                Ok(Err(why)) => self.refuse(why),
                Err(_) => return Order::Quit,
            }
        }
    }

    /// Waits for `pause`; returns true early if a command comes.
    fn interrupted(&mut self, pause: Duration) -> bool {
        if !self.plan.hold {
            thread::sleep(pause);
            return false;
        }
        let next = if pause.is_zero() {
            self.orders.try_recv().map_err(|error| error == TryRecvError::Disconnected)
        } else {
            self.orders.recv_timeout(pause).map_err(|error| error == RecvTimeoutError::Disconnected)
        };
        self.waiting = match next {
            Ok(Ok(order)) => Some(order),
            Ok(Err(why)) => {
                self.refuse(why);
                None
            }
            Err(true) => Some(Order::Quit),
            Err(false) => None,
        };
        self.waiting.is_some()
    }

    fn refuse(&self, why: String) {
        // The next report fails in the same way and ends the load.
        let _ = output::json(&Event::Refused { why });
    }
}

/// Reads the commands from standard input; a line that is none gives the reason.
fn orders() -> Receiver<Result<Order, String>> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let order = match line.trim() {
                "verify" => Ok(Order::Verify),
                "rewrite" => Ok(Order::Rewrite),
                "free" => Ok(Order::Free),
                "quit" => Ok(Order::Quit),
                other => Err(format!("'{other}' is none of verify, rewrite, free, quit")),
            };
            if sender.send(order).is_err() {
                return;
            }
        }
    });
    receiver
}
