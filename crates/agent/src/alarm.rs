//! An alarm by a timer of the kernel, for a task that sets one several times a second.
//!
//! tokio's own timers wake a worker up to three times for each deadline: at a boundary of its timer
//! wheel, at the deadline, and once more because the new timer is earlier than the last one.

use std::future::pending;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::read;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::sys::watch;

/// An alarm. It is set to one time at most.
#[derive(Debug)]
pub(crate) struct Alarm {
    timer: AsyncFd<OwnedFd>,
    set_to: Option<Instant>,
}

impl Alarm {
    /// Makes an alarm that is not set.
    ///
    /// # Errors
    /// If the kernel has no descriptor left.
    pub(crate) fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = watch(timerfd_create(TimerfdClockId::Monotonic, flags)?, Interest::READABLE)?;
        Ok(Self { timer, set_to: None })
    }

    /// Waits until this time; for ever without one. If the caller drops the future, the alarm stays
    /// set, and the next call costs nothing if its time is the same.
    pub(crate) async fn wait(&mut self, until: Option<Instant>) {
        let Some(until) = until else { return pending().await };
        if self.set_to != Some(until) {
            self.set_to = None;
            if set(&self.timer, until).is_err() {
                return tokio::time::sleep_until(until.into()).await;
            }
            self.set_to = Some(until);
        }
        while Instant::now() < until {
            let Ok(mut ready) = self.timer.readable().await else { return };
            // This clears the timer's count, so that the next wait is for another expiration.
            let _ = ready.try_io(|timer| Ok(read(timer, &mut [0; 8])?));
        }
        self.set_to = None;
    }
}

fn set(timer: &AsyncFd<OwnedFd>, until: Instant) -> io::Result<()> {
    // Zero would disarm the timer (timerfd_settime(2)).
    let rest = until.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
    let value = Timespec { tv_sec: rest.as_secs() as i64, tv_nsec: rest.subsec_nanos().into() };
    let once = Itimerspec { it_interval: Timespec::default(), it_value: value };
    timerfd_settime(timer, TimerfdTimerFlags::empty(), &once)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
    }

    /// Waits for an alarm, but not for long; returns whether it rang.
    async fn rings(alarm: &mut Alarm, until: Option<Instant>) -> bool {
        tokio::time::timeout(Duration::from_millis(50), alarm.wait(until)).await.is_ok()
    }

    #[test]
    fn an_alarm_rings_at_its_time_and_not_before() {
        run(async {
            let mut alarm = Alarm::new().unwrap();
            for millis in [0, 1, 30, 100] {
                let until = Instant::now() + Duration::from_millis(millis);
                alarm.wait(Some(until)).await;
                assert!(Instant::now() >= until);
            }
        });
    }

    #[test]
    fn an_alarm_can_be_put_off_brought_forward_and_forgotten() {
        run(async {
            let mut alarm = Alarm::new().unwrap();
            let (soon, later) = (Duration::from_millis(1), Duration::from_secs(3600));
            let far = Instant::now() + later;
            assert!(!rings(&mut alarm, Some(far)).await);
            assert!(!rings(&mut alarm, Some(far)).await, "the same again");
            alarm.wait(Some(Instant::now() + soon)).await;
            assert!(!rings(&mut alarm, Some(far)).await, "the last one rang once");
            assert!(!rings(&mut alarm, None).await);
            // This one rings while nobody waits.
            let until = Instant::now() + soon;
            let waiting = alarm.wait(Some(until));
            drop(waiting);
            std::thread::sleep(soon);
            alarm.wait(Some(until)).await;
            assert!(!rings(&mut alarm, Some(far)).await);
        });
    }
}
