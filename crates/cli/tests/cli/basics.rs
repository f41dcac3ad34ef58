//! Tests of the command line itself: help, errors, JSON, pipes.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use serde_json::Value;

use crate::common::{aquifer, stderr, stdout};

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn doctor_gives_the_same_verdict_to_people_and_programs() {
    let dir = tempfile::tempdir().unwrap();
    let text = aquifer(dir.path()).arg("doctor").output().unwrap();
    let output = aquifer(dir.path()).args(["doctor", "--json"]).output().unwrap();
    let report = json(&stdout(&output));
    assert_eq!(output.status.code(), text.status.code());
    assert_eq!(report["able"].as_bool().unwrap(), output.status.success());
    for check in report["checks"].as_array().unwrap() {
        assert!(stdout(&text).contains(check["name"].as_str().unwrap()), "{check}");
    }
    assert!(!stdout(&text).contains('\x1b'), "output to a pipe must have no colours");
}

#[test]
fn every_command_has_a_manual_and_a_page() {
    let dir = tempfile::tempdir().unwrap();
    let pages = dir.path().join("man");
    assert!(aquifer(dir.path()).arg("man").arg(&pages).status().unwrap().success());
    let mut count = 0;
    for entry in fs::read_dir(pages.join("man1")).unwrap() {
        let page = fs::read_to_string(entry.unwrap().path()).unwrap();
        for section in ["NAME", "SYNOPSIS", "DESCRIPTION", "EXAMPLES", "EXIT STATUS"] {
            assert!(page.contains(&format!(".SH {section}")), "the page lacks {section}:\n{page}");
        }
        count += 1;
    }
    assert!(count > 5);
    let page = fs::read_to_string(pages.join("man1/aquifer-serve-disk-cache.1")).unwrap();
    assert!(page.contains("\\fBaquifer serve disk\\-cache\\fR"), "{page}");
    let page = fs::read_to_string(pages.join("man5/aquifer.toml.5")).unwrap();
    assert!(page.contains("\n\\fBio_timeout\\fR (time, default \"8s\")\n"), "{page}");
    let help = aquifer(dir.path()).args(["run", "--help"]).output().unwrap();
    for section in ["Usage:", "Examples:", "Exit status:", "See also:"] {
        assert!(stdout(&help).contains(section), "{}", stdout(&help));
    }
}

#[test]
fn completions_are_made_for_every_shell() {
    let dir = tempfile::tempdir().unwrap();
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let output = aquifer(dir.path()).args(["completions", shell]).output().unwrap();
        assert!(output.status.success(), "{shell}: {}", stderr(&output));
        assert!(stdout(&output).contains("AQUIFER_COMPLETE"), "{shell}: {}", stdout(&output));
    }
}

#[test]
fn an_error_names_the_failure_its_cause_and_the_way_out() {
    let dir = tempfile::tempdir().unwrap();
    let output = aquifer(dir.path()).arg("status").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert!(
        text.starts_with("aquifer: asking for the status: no agent answers at unix:"),
        "{text}"
    );
    assert!(text.contains("\n  help: start one"), "{text}");

    let output = aquifer(dir.path()).args(["status", "--json"]).output().unwrap();
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(1), ""));
    assert_eq!(json(&stderr(&output))["error"]["what"], "asking for the status");
}

#[test]
fn misuse_is_exit_code_2_in_either_form() {
    let dir = tempfile::tempdir().unwrap();
    let output = aquifer(dir.path()).args(["host", "borow"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("'borrow'"),
        "the error must name the nearest command: {}",
        stderr(&output)
    );
    let output =
        aquifer(dir.path()).args(["host", "borrow", "--size", "much", "--json"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        json(&stderr(&output))["error"]["why"].as_str().unwrap().contains("'much' is not a size")
    );
    let output = aquifer(dir.path()).args(["drain", "--json"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        json(&stderr(&output))["error"]["why"].as_str().unwrap().contains("'aquifer host drain'")
    );
    let output = aquifer(dir.path()).args(["cluster", "init", "--host", "a"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let output = aquifer(dir.path()).args(["group", "set", "blue", "--json"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(json(&stderr(&output))["error"]["why"].as_str().unwrap().contains("at least one term"));
}

#[test]
fn a_reader_that_has_enough_is_no_failure() {
    let dir = tempfile::tempdir().unwrap();
    for words in [&["doctor"] as &[&str], &["--help"], &["man"], &["completions", "bash"]] {
        let mut child = aquifer(dir.path())
            .args(words)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!(stderr(&output), "", "{words:?}");
        assert_eq!(output.status.code(), Some(0), "{words:?}");
    }
}

#[test]
fn init_makes_the_files_that_each_host_needs() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = dir.path().join("cluster");
    let mut command = aquifer(dir.path());
    command.args(["cluster", "init", "--json", "--dir"]).arg(&cluster);
    command.args([
        "--host",
        "a",
        "--address",
        "192.0.2.1",
        "--host",
        "b",
        "--address",
        "192.0.2.2",
    ]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let made = json(&stdout(&output));
    for host in made["hosts"].as_array().unwrap() {
        for file in ["agent.toml", "tls/ca.pem", "tls/host.pem", "tls/host.key"] {
            assert!(
                std::path::Path::new(host["dir"].as_str().unwrap()).join(file).exists(),
                "{file}"
            );
        }
    }
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "a second init must overwrite nothing");
    assert!(json(&stderr(&output))["error"]["help"].as_str().unwrap().contains("--force"));
}

/// A load that holds its memory, with the ends of its pipes.
struct Load(Child, Option<ChildStdin>, BufReader<ChildStdout>);

impl Load {
    fn start(words: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut command = aquifer(dir.path());
        command.arg("load").args(words).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take().unwrap());
        Self(child, stdin, BufReader::new(stdout))
    }

    fn say(&mut self, order: &str) {
        writeln!(self.1.as_ref().unwrap(), "{order}").unwrap();
    }

    /// Returns the next event of this kind.
    fn event(&mut self, kind: &str) -> Value {
        loop {
            let mut line = String::new();
            assert!(self.2.read_line(&mut line).unwrap() > 0, "the load ended without '{kind}'");
            let event = json(&line);
            if event["event"] == kind {
                return event;
            }
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_load_keeps_its_content_until_it_is_ordered_otherwise() {
    let mut load = Load::start(&["--bytes", "4M", "--hold"]);
    assert_eq!(load.event("filled")["pages_written"], 1024);
    load.say("verify");
    let verdict = load.event("verified");
    assert_eq!((&verdict["pages_verified"], &verdict["pages_lost"]), (&1024.into(), &0.into()));
    load.say("rewrite");
    assert_eq!(load.event("filled")["pages_written"], 2048);
    load.say("verify");
    assert_eq!(load.event("verified")["pages_verified"], 1024);
    load.say("dance");
    assert!(load.event("refused")["why"].as_str().unwrap().contains("'dance'"));
    load.say("free");
    load.event("freed");
    load.say("quit");
    assert!(load.0.wait().unwrap().success());
}

#[test]
fn a_slow_load_hears_orders_and_ends_when_nobody_gives_any_more() {
    let mut load = Load::start(&["--bytes", "1G", "--rate", "4M", "--hold"]);
    load.event("progress");
    load.say("verify");
    let verdict = load.event("verified");
    assert_eq!(verdict["pages_written"], verdict["pages_verified"]);
    assert!(
        verdict["pages_written"].as_u64().unwrap() < 1 << 18,
        "the load must not have written all pages yet"
    );
    load.1 = None;
    load.2.read_to_string(&mut String::new()).unwrap();
    assert!(load.0.wait().unwrap().success());
}
