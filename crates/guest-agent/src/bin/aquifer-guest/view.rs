//! The output of the command, as text or JSON.

use aquifer_guest_agent::message::{BlockSizes, GuestReport};
use aquifer_guest_agent::{Granted, GuestStatus};
use aquifer_page::Bytes;
use serde::Serialize;

use crate::size::Change;

/// Prints the outcome of a request.
pub(crate) fn granted(granted: &Granted, change: Change, json: bool) {
    if json {
        return print(granted);
    }
    let by = Bytes(granted.granted.unsigned_abs());
    let done = match (granted.granted, change) {
        (1.., _) => format!("{by} more"),
        (..0, _) => format!("{by} less"),
        (0, Change::More(_)) => "nothing more".to_owned(),
        (0, Change::Less(_)) => "nothing less".to_owned(),
    };
    println!("{done}: this guest has {} now", granted.size);
    if granted.missing > Bytes::ZERO {
        let why = granted.why.as_deref().unwrap_or("the host gives no reason");
        println!("{} of the request is missing: {why}", granted.missing);
    }
}

/// Prints the agent's status.
pub(crate) fn status(status: &GuestStatus, json: bool) {
    if json {
        return print(status);
    }
    let GuestReport { total, available, free, swap_total, swap_used, stalls, blocks, .. } =
        status.report;
    let host = match (status.connected, status.period_ms) {
        (false, _) => "absent".to_owned(),
        (true, None) => "connected".to_owned(),
        (true, Some(period)) => format!("connected, receives a report every {period} ms"),
    };
    row("host", &host);
    row("memory", &format!("{total}, {available} available, {free} free"));
    let BlockSizes { online, offline, block } = blocks;
    if online > Bytes::ZERO {
        row("blocks", &format!("{online} online, {offline} offline, of {block} each"));
    }
    row("swap", &format!("{swap_used} of {swap_total} used"));
    if let (Some(some), Some(full)) = (stalls.pressure_some, stalls.pressure_full) {
        row(
            "pressure",
            &format!("{some:.1} % of the last 10 s some task stalled for memory, {full:.1} % all"),
        );
    }
    row("killed", &format!("{} processes since the guest booted", status.report.oom_kills));
    let mut asks = Vec::new();
    if status.urgent_below > Bytes::ZERO {
        asks.push(format!("below {} available", status.urgent_below));
    }
    if status.watches_pressure {
        asks.push("when tasks stall for memory".to_owned());
    }
    let asks = if asks.is_empty() { "never".to_owned() } else { asks.join(", and ") };
    row("asks on its own", &asks);
    row("requests", &format!("{} without an answer yet", status.pending));
}

fn row(name: &str, value: &str) {
    println!("{name:<15} {value}");
}

fn print(value: &impl Serialize) {
    match serde_json::to_string(value) {
        Ok(text) => println!("{text}"),
        Err(error) => eprintln!("aquifer-guest: {error}"),
    }
}
