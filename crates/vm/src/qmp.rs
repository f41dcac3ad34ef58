//! A client of the QEMU Machine Protocol (QEMU's interop/qmp-spec). Each line is a JSON object: a
//! greeting, a command, a reply, or an event between them.

use std::io::{self, BufReader, Write as _};
use std::path::Path;
use std::time::Duration;

use aquifer_control_socket::{ControlCall, next_answer};
use serde_json::{Value, json};

use crate::error::VmError;

/// A connection to QEMU's monitor, ready for commands. A monitor serves one client at a time; the
/// next one waits until this one is dropped.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<ControlCall>,
    timeout: Duration,
}

impl Qmp {
    /// Connects to the monitor at a unix socket. `timeout` is the timeout of each answer,
    /// including the events before it.
    ///
    /// # Errors
    /// [`VmError::Io`] if no process listens there, QEMU does not greet within `timeout`, or
    /// the greeting is not QMP's. QEMU does not greet while it is stopped or another client has the
    /// monitor.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, VmError> {
        let fail =
            || VmError::io(format!("cannot connect to QEMU's monitor at {}", path.display()));
        let call = ControlCall::connect(path, "greeting", timeout).map_err(fail())?;
        let mut qmp = Self { stream: BufReader::new(call), timeout };
        let greeting = qmp.receive().map_err(fail())?;
        if greeting["QMP"].is_null() {
            return Err(fail()(io::Error::other(format!("unexpected greeting: {greeting}"))));
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Executes a command and returns QEMU's answer.
    ///
    /// # Errors
    /// [`VmError::Refused`] if QEMU answers with an error; [`VmError::Io`] if it does not
    /// answer in time, or has exited.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, VmError> {
        let fail = || VmError::io(format!("QEMU does not answer '{command}'"));
        let mut line = json!({ "execute": command, "arguments": arguments }).to_string();
        line.push('\n');
        self.stream.get_mut().begin(command, self.timeout);
        self.stream.get_mut().write_all(line.as_bytes()).map_err(fail())?;
        loop {
            let mut message = self.receive().map_err(fail())?;
            if !message["return"].is_null() {
                return Ok(message["return"].take());
            }
            if !message["error"].is_null() {
                let why =
                    message["error"]["desc"].as_str().unwrap_or("QEMU gives no reason").to_owned();
                return Err(VmError::Refused { command: command.to_owned(), why });
            }
            // Anything else is an event.
        }
    }

    /// Returns QEMU's name of the migration's state, or `none` if there was no migration.
    ///
    /// # Errors
    /// Those of [`execute`](Self::execute).
    pub fn migration(&mut self) -> Result<String, VmError> {
        let answer = self.execute("query-migrate", json!({}))?;
        Ok(answer["status"].as_str().unwrap_or("none").to_owned())
    }

    fn receive(&mut self) -> io::Result<Value> {
        next_answer(&mut self.stream)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::io::BufRead as _;
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    #[test]
    fn events_between_a_command_and_its_reply_are_no_reply() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let qemu = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let mut say = |text: &str| writeln!(stream, "{text}").unwrap();
            say(r#"{"QMP": {"version": {}, "capabilities": []}}"#);
            assert_eq!(
                lines.next().unwrap().unwrap(),
                r#"{"arguments":{},"execute":"qmp_capabilities"}"#
            );
            say(r#"{"return": {}}"#);
            lines.next();
            say(r#"{"event": "STOP", "timestamp": {}}"#);
            say(r#"{"return": {"status": "paused"}}"#);
            lines.next();
            say(r#"{"error": {"class": "GenericError", "desc": "no such thing"}}"#);
        });
        let mut qmp = Qmp::connect(&path, Duration::from_secs(20)).unwrap();
        assert_eq!(qmp.execute("query-status", json!({})).unwrap()["status"], "paused");
        let refused = qmp.execute("nothing", json!({})).unwrap_err();
        assert_eq!(refused.to_string(), "QEMU refuses 'nothing': no such thing");
        qemu.join().unwrap();
        assert!(matches!(qmp.execute("query-status", json!({})), Err(VmError::Io { .. })));
    }

    #[test]
    fn events_do_not_put_off_the_end_of_a_wait() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let qemu = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            writeln!(stream, r#"{{"QMP": {{}}}}"#).unwrap();
            writeln!(stream, r#"{{"return": {{}}}}"#).unwrap();
            while writeln!(stream, r#"{{"event": "RTC_CHANGE"}}"#).is_ok() {
                thread::sleep(Duration::from_millis(20));
            }
        });
        let mut qmp = Qmp::connect(&path, Duration::from_secs(1)).unwrap();
        let error = qmp.execute("query-status", json!({})).unwrap_err().to_string();
        assert!(error.ends_with("no answer to 'query-status' within 1s"), "{error}");
        drop(qmp);
        qemu.join().unwrap();
    }
}
