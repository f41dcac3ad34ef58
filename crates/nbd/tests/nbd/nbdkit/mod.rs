//! nbdkit as a child process on its own unix socket; dropping the handle kills it.

// Each test uses only a part of this module.
#![allow(dead_code, clippy::unwrap_used)]

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_transport::Address;
use tempfile::TempDir;

use super::freezing;

pub struct Nbdkit {
    child: Child,
    arguments: Vec<String>,
    dir: TempDir,
}

impl Nbdkit {
    /// Starts nbdkit with these arguments and waits until it listens.
    pub fn start(arguments: &[&str]) -> Self {
        Self::run(tempfile::tempdir().unwrap(), arguments.iter().map(ToString::to_string).collect())
    }

    /// Starts nbdkit as [`start`](Self::start) does, requiring TLS, with the certificate of the
    /// host in `identity`.
    pub fn start_tls(identity: &Path, arguments: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for (ours, theirs) in [("ca", "ca-cert.pem"), ("host", "server-cert.pem")] {
            fs::copy(identity.join(ours).with_extension("pem"), dir.path().join(theirs)).unwrap();
        }
        fs::copy(identity.join("host.key"), dir.path().join("server-key.pem")).unwrap();
        let mut all = vec!["--tls=require".to_owned(), "--tls-verify-peer".to_owned()];
        all.push(format!("--tls-certificates={}", dir.path().display()));
        all.extend(arguments.iter().map(ToString::to_string));
        Self::run(dir, all)
    }

    fn run(dir: TempDir, arguments: Vec<String>) -> Self {
        let server = Self { child: spawn(&dir, &arguments), arguments, dir };
        server.wait();
        server
    }

    /// Starts nbdkit again after [`kill`](Self::kill), at the same address.
    pub fn restart(&mut self) {
        let _ = fs::remove_file(self.socket());
        self.child = spawn(&self.dir, &self.arguments);
        self.wait();
    }

    fn wait(&self) {
        let deadline = Instant::now() + Duration::from_secs(120);
        while UnixStream::connect(self.socket()).is_err() {
            assert!(Instant::now() < deadline, "nbdkit does not listen");
            thread::yield_now();
        }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("nbd")
    }

    pub fn address(&self) -> Address {
        Address::Unix(self.socket())
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Stops the process: its connections stay open and nothing answers.
    pub fn freeze(&self) {
        freezing::freeze(&self.child);
    }

    /// Resumes the process after [`freeze`](Self::freeze).
    pub fn thaw(&self) {
        freezing::thaw(&self.child);
    }
}

fn spawn(dir: &TempDir, arguments: &[String]) -> Child {
    Command::new("nbdkit")
        .args(["--foreground", "--exit-with-parent", "--unix"])
        .arg(dir.path().join("nbd"))
        .args(arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("nbdkit is installed")
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
