//! Tests of the words that `aquifer demo` passes on, and of the replies.

use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::{aquifer, stderr, stdout};

#[test]
fn help_of_the_demos_is_that_of_aquifer_demo() {
    let dir = tempfile::tempdir().unwrap();
    let help = |words: &[&str]| {
        let output = aquifer(dir.path()).arg("demo").args(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", stderr(&output));
        stdout(&output)
    };
    let all = help(&["--help"]);
    for demo in ["cluster", "sharing", "region", "migrate", "resize", "groups"] {
        assert!(all.contains(&format!("\n  {demo} ")), "no {demo} in\n{all}");
        let own = help(&[demo, "--help"]);
        let usage = format!("Usage: aquifer demo {demo} ");
        for part in [&usage, "Examples:", &format!("aquifer demo {demo}"), "Exit status:"] {
            assert!(own.contains(part), "no '{part}' in\n{own}");
        }
    }
    assert!(help(&["sharing", "--help"]).contains("at least 192MiB"));
    assert!(help(&["-h"]).contains("Usage: aquifer demo "));
    let mut direct = Command::new(env!("CARGO_BIN_EXE_aquifer-demo"));
    let direct = direct.arg("--help").env("AQUIFER_RUN_DIR", dir.path()).output().unwrap();
    assert_eq!(stdout(&direct), all);
}

#[test]
fn misuse_and_failures_keep_their_codes_and_their_json() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |words: &[&str]| {
        let output = aquifer(dir.path()).args(words).output().unwrap();
        assert_eq!(stdout(&output), "", "{words:?}");
        (output.status.code(), stderr(&output))
    };
    for words in [&["demo"] as &[&str], &["demo", "sharin"], &["demo", "sharing", "--nosuch"]] {
        assert_eq!(refused(words).0, Some(2), "{words:?}");
    }
    for words in [
        ["--json", "demo", "sharing", "--memory", "1M"],
        ["demo", "--json", "sharing", "--memory", "1M"],
        ["demo", "sharing", "--memory", "1M", "--json"],
    ] {
        let (code, text) = refused(&words);
        let error: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((code, &error["error"]["why"]), (Some(1), &"the least is 192MiB".into()));
        let words = words.map(|word| if word == "1M" { "much" } else { word });
        let (code, text) = refused(&words);
        let error: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((code, &error["error"]["what"]), (Some(2), &"reading the command line".into()));
    }
    let (code, text) = refused(&["demo", "sharing", "--memory", "1M"]);
    assert!(code == Some(1) && text.starts_with("aquifer: playing hosts of 1MiB"), "{text}");
}

#[test]
fn without_aquifer_beside_it_a_demo_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let alone = dir.path().join("aquifer-demo");
    let program = env!("CARGO_BIN_EXE_aquifer-demo");
    fs::hard_link(program, &alone).or_else(|_| fs::copy(program, &alone).map(drop)).unwrap();
    let mut command = Command::new(&alone);
    let output = command.arg("region").env("AQUIFER_RUN_DIR", dir.path()).output().unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("finding 'aquifer'") && text.contains("help: install"), "{text}");
}
