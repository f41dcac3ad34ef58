//! A process that needs memory: fills it with checked content, holds it, verifies it, as it is told on standard input.
//!
//! Reports are JSON lines on standard output, commands are words on standard input, one a line. The end of standard input
//! means that whoever gave the commands is gone, and ends the load.

use std::io::BufRead;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, PAGE_SIZE};
use serde::{Deserialize, Serialize};

use super::content::Pages;
use crate::failure::{OrFail, Result};
use crate::output;

/// What a load does.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// How much memory it fills.
    pub bytes: Bytes,
    /// How much of it a second; as fast as it can if not given.
    pub rate: Option<Bytes>,
    /// Where its content begins.
    pub seed: u64,
    /// Whether it holds the memory and waits for commands; else it verifies once and ends.
    pub hold: bool,
}

/// What a load reports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// It runs and begins to fill its memory.
    Started {
        /// Pages it is going to write.
        pages: usize,
    },
    /// It goes on.
    Progress {
        /// What it is at.
        doing: Doing,
        /// Pages done of those `Started` told.
        pages: usize,
    },
    /// All its memory is filled.
    Filled {
        /// Pages written since it started.
        pages_written: u64,
    },
    /// All its memory has been read and compared.
    Verified(Verdict),
    /// Its memory has been given back to the system.
    Freed,
    /// A command it does not know, or cannot do now.
    Refused {
        /// Why.
        why: String,
    },
}

/// What a load is busy with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Doing {
    /// Writing pages.
    Filling,
    /// Reading and comparing pages.
    Verifying,
}

/// What a load found in its memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// Pages written since it started.
    pub pages_written: u64,
    /// Pages whose every byte is what was written last.
    pub pages_verified: u64,
    /// Pages of which a byte is not.
    pub pages_lost: u64,
    /// The first of those.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_lost: Option<usize>,
}

/// What a load can be told.
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
/// If it cannot report.
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

/// How many pages are written between looks at the clock and at the orders.
const BATCH: usize = 64;

/// How often a load says how far it is.
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

    /// Writes every page once more, no faster than planned. An order ends it early and is carried out next.
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

    /// Reads and compares every page that was written.
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

    /// The next order: the one that ended a fill, else the next from outside; without any, to verify.
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

    /// Waits for `pause`; true if an order came meanwhile.
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

/// The orders from standard input, or why a line is none.
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
