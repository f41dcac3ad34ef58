//! Tests of the command line of `aquifer-demo`.

use std::collections::BTreeSet;

use super::*;

#[test]
fn the_command_line_is_sound() {
    command().debug_assert();
}

#[test]
fn every_demo_has_a_manual_and_no_other_has() {
    let command = command();
    let demos: BTreeSet<_> = command.get_subcommands().map(clap::Command::get_name).collect();
    assert_eq!(demos, MANUALS.iter().map(|(name, _)| *name).collect());
}

#[test]
fn every_example_parses() {
    for (name, manual) in MANUALS.iter().chain(&[("", &demo::MANUAL)]) {
        assert!(!manual.examples.is_empty(), "'{name}' has no examples");
        for (line, _) in manual.examples {
            let words = line.strip_prefix("aquifer demo").unwrap();
            assert!(words.trim_start().starts_with(name), "{line} is not of '{name}'");
            let line = ["aquifer-demo"].into_iter().chain(words.split_whitespace());
            Demo::parse(line.map(OsString::from).collect()).unwrap();
        }
    }
}

#[test]
fn an_option_after_the_demos_name_overrides_one_before() {
    let line = ["aquifer-demo", "--run-dir", "/a", "sharing", "--run-dir", "/b", "--json"];
    let demo = Demo::parse(line.map(OsString::from).into()).unwrap();
    assert!(demo.common.json);
    assert_eq!(demo.common.run_dir, PathBuf::from("/b"));
}

#[test]
fn the_first_processes_of_guests_are_named_nowhere() {
    let help = command().render_long_help().to_string();
    for name in ["guest-load", "guest-memory"] {
        assert!(!help.contains(name), "{help}");
        let refused = command().try_get_matches_from(["aquifer-demo", &name[1..]]);
        assert!(!refused.unwrap_err().to_string().contains(&format!("'{name}'")), "{name}");
    }
}
