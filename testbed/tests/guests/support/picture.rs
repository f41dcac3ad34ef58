//! Hosts' memory over time, as the demo draws it.

use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use anyhow::{Result, anyhow};
use aquifer_api::status::Status;
use aquifer_demo::picture::{History, Sample, png};
use aquifer_testbed::{Host, Testbed};

use super::Aquifer as _;

/// Interval between two looks at the hosts: their emulated processors are busy.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

/// Calls `play` and, if `AQUIFER_PICTURES` is set, draws the hosts' memory meanwhile.
pub fn drawn(
    hosts: &Testbed,
    name: &str,
    title: &str,
    play: impl FnOnce(&Testbed) -> Result<()>,
) -> Result<()> {
    let Some(dir) = env::var_os("AQUIFER_PICTURES") else { return play(hosts) };
    let histories = thread::scope(|scope| {
        let (end, ended) = mpsc::channel::<()>();
        let watcher = scope.spawn(move || watch(hosts, &ended));
        let played = play(hosts);
        drop(end);
        let watched = watcher.join().map_err(|_| anyhow!("the sampling thread panicked"))?;
        played.and(watched)
    })?;
    let picture = png(title, &histories).map_err(|failure| anyhow!("{failure:?}"))?;
    fs::create_dir_all(&dir)?;
    Ok(fs::write(Path::new(&dir).join(format!("{name}.png")), picture)?)
}

fn watch(hosts: &Testbed, ended: &mpsc::Receiver<()>) -> Result<Vec<History>> {
    let began = Instant::now();
    let mut histories = hosts.hosts().iter().map(history).collect::<Result<Vec<_>>>()?;
    while ended.recv_timeout(SAMPLE_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        for (host, history) in hosts.hosts().iter().zip(&mut histories) {
            // A host that is too busy to answer gets another look later.
            if let Ok(status) = host.status() {
                history.samples.push(sample(&status, began.elapsed()));
            }
        }
    }
    Ok(histories)
}

fn history(host: &Host) -> Result<History> {
    let memory = host.status()?.memory;
    let (limit, upper, lower) = (memory.total, memory.upper, memory.lower);
    Ok(History { title: format!("host {host}"), limit, upper, lower, samples: Vec::new() })
}

fn sample(status: &Status, at: Duration) -> Sample {
    Sample {
        at: at.as_secs_f64(),
        ram: status.memory.used,
        swap: status.memory.swap_used,
        lent: status.loans.lent.iter().map(|lent| lent.stored).sum(),
        role: status.role,
    }
}
